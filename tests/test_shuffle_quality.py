"""Both orders mix as a uniformly random one does, in rows and in clumps.

All distances are in standard deviations of a uniformly random order, found by theory (see the benchmark): occupancy
for the neighbourhoods that a window meets, chi-square for their variance, 1 / sqrt(pairs) for correlations, Poisson's
for neighbours that stay neighbours. Beyond 5 of them lie 6e-7 of normal values: of the 180 here one would lie there in
10,000 runs with other seeds.
"""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.shuffle_quality import Quality, measure, qualities

from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, TableIdentity

pytestmark = pytest.mark.thorough

SPLITS, CYCLES = 64, 4
LIMIT = 5.0


def test_orders_mix_like_a_random_one() -> None:
    found: dict[tuple[str, int], list[Quality]] = {}
    for quality in qualities(SPLITS, CYCLES, seeds=(20,)):
        found.setdefault((quality.order, quality.clump), []).append(quality)
    assert set(found) == {(order, clump) for order in ("feistel", "lancedb") for clump in (1, 64, 1024)}
    far = [(q.order, q.clump, q.clumps, s) for many in found.values() for q in many for s in q.sigmas if abs(s) > LIMIT]
    assert not far
    # All together they spread as they should: of n squares the mean is 1, with a deviation of sqrt(2 / n). Windows of
    # one order are not independent of those ten times as long, so that n is taken to be half as large.
    squares = np.array([s * s for many in found.values() for q in many for s in q.sigmas])
    assert abs(squares.mean() - 1) < LIMIT * np.sqrt(2 / (len(squares) / 2))


def shuffled_by(rows: IntArray) -> Quality:
    """Measures rows in any order, as a list that LanceDB's order would have."""
    order = OrderSpec(num_splits=SPLITS, order="lancedb")
    plan = Plan(PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=order, epoch=0), len(rows), rows)
    return measure(plan, len(rows), cycles_per_step=CYCLES)


def test_the_measure_tells_other_orders() -> None:
    draw, count = np.random.default_rng(3), 4**8
    assert max(map(abs, shuffled_by(draw.permutation(count)).sigmas)) < LIMIT
    # A buffer of 4,096 rows, shuffled one after the other.
    buffered = np.concatenate([part[draw.permutation(4096)] for part in np.arange(count).reshape(-1, 4096)])
    assert shuffled_by(buffered).correlations["position +16"] > LIMIT
    assert shuffled_by(buffered).near_sigmas > LIMIT
    # Nearly random, but every second row follows its neighbour.
    pairs = (2 * draw.permutation(count // 2)[:, None] + np.arange(2)).ravel()
    assert shuffled_by(pairs).near_sigmas > LIMIT
    # Windows that take rows by sixteens, as they lie in the table, meet few neighbourhoods.
    runs = (16 * draw.permutation(count // 16)[:, None] + np.arange(16)).ravel()
    assert shuffled_by(runs).windows[0].sigmas < -LIMIT
