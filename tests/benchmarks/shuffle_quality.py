"""How well rows are mixed, beside what a uniformly random order gives by theory.

    python tests/benchmarks/shuffle_quality.py [--directory DIR] [--splits 64] [--cycles-per-step 4]

Clumps are what is shuffled, so all is measured in clumps: with ``shuffle_clump_size`` 1 these are rows. A source
neighbourhood is 16 clumps that lie side by side in the table. For each order, clump size, number of clumps and seed:

* windows: distinct neighbourhoods in a global batch, and in 10 of them, beside the expected number, as the mean's
  distance from it in standard deviations, and the ratio of the variances;
* correlations: of the source positions of clumps so far apart in the order, times the square root of their number,
  which is their distance from 0 in standard deviations;
* neighbours: pairs of successive clumps that lie at most 8 apart in the table, beside the expected number.

Orders: "feistel" at numbers of clumps that are powers of 4, one above (where Feistel's domain is four times too
large), primes, and powers of 3; "lancedb" on tables written for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lancedb
import numpy as np
import pyarrow as pa

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save

from ray_lance_stream import LanceStream
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, TableIdentity

NEIGHBOURHOOD: Final = 16  # clumps
NEAR: Final = 8  # clumps apart
LAGS: Final = (1, 2, 16)
FEISTEL: Final[dict[int, tuple[int, ...]]] = {
    1: (4**8, 4**8 + 1, 3**10, 65_521),  # 4**8 + 1 is a prime as well, and so is 65,521
    64: (4**6, 4**6 + 1, 3**8, 5003),
    1024: (4**6, 4**6 + 1, 3**8, 5003),
}
LANCEDB: Final[dict[int, tuple[int, ...]]] = {1: (4**8, 65_521), 64: (4**6 + 1,), 1024: (3**6,)}
SEEDS: Final = (0, 1, 2**64 - 1)
SIGMAS: Final = 5.0  # beyond them lie 6e-7 of normal values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How many groups a sample without replacement meets: of ``total`` items in groups of ``size``, ``drawn``.

    The last group may be short. The expected number of groups met and its variance follow from the probabilities
    that one group is missed, and that two are.
    """

    total: int
    size: int
    drawn: int

    def _missed(self, items: int) -> float:
        """The probability that none of so many items is drawn: C(total - items, drawn) / C(total, drawn)."""
        others = self.total - items
        if self.drawn > others:
            return 0.0
        logs = [math.lgamma(others + 1), -math.lgamma(others - self.drawn + 1)]
        logs += [-math.lgamma(self.total + 1), math.lgamma(self.total - self.drawn + 1)]
        return math.exp(math.fsum(logs))

    @property
    def mean(self) -> float:
        """Expected number of groups met."""
        full, rest = divmod(self.total, self.size)
        return full * (1 - self._missed(self.size)) + (1 - self._missed(rest))

    @property
    def variance(self) -> float:
        """Its variance: that of each group, and the covariance of each pair."""
        full, rest = divmod(self.total, self.size)
        one, last = self._missed(self.size), self._missed(rest)
        pairs = full * (full - 1) * (self._missed(2 * self.size) - one * one)
        pairs += 2 * full * (self._missed(self.size + rest) - one * last)
        return full * one * (1 - one) + last * (1 - last) + pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows of one length.

    Attributes:
        batches: Global batches in a window.
        count: Windows.
        clumps: Clumps in a window, on average.
        met: Neighbourhoods met, on average.
        expected: What is expected of a random order.
        sigmas: How many standard deviations of the mean lie between.
        variance_ratio: Variance among windows over that of a random order.
        variance_sigmas: How far that is from 1, in its standard deviations.
    """

    batches: int
    count: int
    clumps: float
    met: float
    expected: float
    sigmas: float
    variance_ratio: float
    variance_sigmas: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """What was measured of one order.

    Attributes:
        order: The order.
        clump: Rows of a clump.
        clumps: Number of clumps.
        seed: The seed.
        windows: Neighbourhoods met.
        correlations: In standard deviations from 0, by lag: in splits ("position") and across them ("split").
        near: Successive clumps that lie near each other in the table.
        near_expected: What is expected of a random order.
    """

    order: str
    clump: int
    clumps: int
    seed: int
    windows: tuple[Windows, ...]
    correlations: dict[str, float]
    near: int
    near_expected: float

    @property
    def near_sigmas(self) -> float:
        """How many standard deviations lie between; the number of such pairs is nearly one of Poisson's."""
        return (self.near - self.near_expected) / math.sqrt(self.near_expected)

    @property
    def sigmas(self) -> list[float]:
        """All distances from what is expected, in standard deviations."""
        windows = [s for w in self.windows for s in (w.sigmas, w.variance_sigmas)]
        return [*windows, *self.correlations.values(), self.near_sigmas]


def measure(plan: Plan, rows: int, *, cycles_per_step: int) -> Quality:
    """Measures one order of a table of so many rows."""
    order, layout = plan.spec.order, plan.layout
    clump, count = order.shuffle_clump_size, -(-rows // order.shuffle_clump_size)
    windows = tuple(_windows(plan, count, batches, cycles_per_step) for batches in (1, 10))
    # One row in each clump: positions a clump's length apart are never in the same one.
    turns = layout.rows_per_split // clump
    grid = plan.rows(np.arange(layout.num_splits)[:, None], np.arange(turns)[None, :] * clump) // clump
    lags = [lag for lag in LAGS if lag < turns]
    correlations = {f"position +{lag}": _correlation(grid[:, :-lag], grid[:, lag:], count) for lag in lags}
    correlations |= {f"split +{lag}": _correlation(grid[:-lag], grid[lag:], count) for lag in LAGS}
    apart = np.abs(np.diff(grid, axis=1))
    # Of the ordered pairs of different clumps, 2 * (count - d) lie d apart.
    near = sum(2 * (count - d) for d in range(1, NEAR + 1)) / (count * (count - 1))
    return Quality(
        order=order.order,
        clump=clump,
        clumps=count,
        seed=order.shuffle_seed,
        windows=windows,
        correlations=correlations,
        near=int((apart <= NEAR).sum()),
        near_expected=near * apart.size,
    )


def _windows(plan: Plan, count: int, batches: int, cycles_per_step: int) -> Windows:
    clump, layout = plan.spec.order.shuffle_clump_size, plan.layout
    cycles = batches * cycles_per_step
    # So far apart that no clump reaches from one window into the next: they would not be independent.
    apart = cycles if clump == 1 else -(-(cycles + clump) // clump) * clump
    splits = np.arange(layout.num_splits)[:, None]
    met: list[int] = []
    clumps: list[int] = []
    for begin in range(0, layout.rows_per_split - cycles + 1, apart):
        rows = plan.rows(splits, np.arange(begin, begin + cycles)[None, :])
        found = np.unique(rows // clump)
        clumps.append(len(found))
        met.append(len(np.unique(found // NEIGHBOURHOOD)))
    # How many clumps a window has follows from where it begins; which ones is what the order decides.
    known = {n: Occupancy(total=count, size=NEIGHBOURHOOD, drawn=n) for n in set(clumps)}
    means, variance = np.array([known[n].mean for n in clumps]), sum(known[n].variance for n in clumps)
    away = met - means
    freedom = len(met) - 1
    ratio = float(np.sum((away - away.mean()) ** 2)) / freedom / (variance / len(met))
    # The variance of nearly normal values is one of chi-square; its third root is nearly normal (Wilson, Hilferty).
    spread = 2 / (9 * freedom)
    return Windows(
        batches=batches,
        count=len(met),
        clumps=float(np.mean(clumps)),
        met=float(np.mean(met)),
        expected=float(means.mean()),
        # As if windows were independent. What one has met the others meet less, so that the mean varies less: the
        # distance is shown smaller than it is, never larger.
        sigmas=float(away.sum()) / math.sqrt(variance),
        variance_ratio=ratio,
        variance_sigmas=(ratio ** (1 / 3) - 1 + spread) / math.sqrt(spread),
    )


def _correlation(a: IntArray, b: IntArray, count: int) -> float:
    """Returns the correlation of a random order's places, in standard deviations: 1 / sqrt(pairs)."""
    # Of 0 .. count - 1 in any order mean and variance are known. Without replacement, -1 / (count - 1) is expected.
    mean, variance = (count - 1) / 2, (count * count - 1) / 12
    found = float(np.mean((a - mean) * (b - mean))) / variance + 1 / (count - 1)
    return found * math.sqrt(a.size)


def feistel_plan(rows: int, *, num_splits: int, clump: int, seed: int) -> Plan:
    """The closed form, for a table that nobody needs."""
    order = OrderSpec(num_splits=num_splits, shuffle_seed=seed, shuffle_clump_size=clump)
    return Plan(PlanSpec(table=TableIdentity(version=1, fingerprint="any"), order=order, epoch=0), rows)


def lancedb_plan(directory: str, rows: int, *, num_splits: int, clump: int, seed: int) -> Plan:
    """LanceDB's order, as its builder makes it for a table of so many rows."""
    database, name = lancedb.connect(directory), f"rows{rows}"
    if name not in database.list_tables().tables:
        database.create_table(name, pa.table({"id": np.arange(rows, dtype=np.int32)}))
    options: Any = {"shuffle_seed": seed, "shuffle_clump_size": clump, "order": "lancedb"}
    stream = LanceStream(directory, name, num_splits=num_splits, global_batch_size=num_splits, **options)
    with stream.open() as shard:
        handle = shard._open_plan()
        return Plan(handle.spec, handle.num_rows, handle.matching_rows)


def qualities(num_splits: int, cycles_per_step: int, seeds: tuple[int, ...] = SEEDS) -> Iterator[Quality]:
    """Measures all of them. Clumps of more than one row make up tables whose last clump is short."""
    for clump, counts in FEISTEL.items():
        for count in counts:
            for seed in seeds:
                rows = rows_of(count, clump)
                plan = feistel_plan(rows, num_splits=num_splits, clump=clump, seed=seed)
                yield measure(plan, rows, cycles_per_step=cycles_per_step)
    with tempfile.TemporaryDirectory() as directory:
        for clump, counts in LANCEDB.items():
            for count in counts:
                for seed in seeds:
                    rows, first = rows_of(count, clump), min(seed, 2**63)  # epochs add to a seed
                    plan = lancedb_plan(directory, rows, num_splits=num_splits, clump=clump, seed=first)
                    yield measure(plan, rows, cycles_per_step=cycles_per_step)


def rows_of(clumps: int, clump: int) -> int:
    """Returns the rows of a table of so many clumps, the last of which is short unless it is one row."""
    return clumps * clump - clump // 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("output/benchmarks"))
    parser.add_argument("--splits", type=int, default=64)
    parser.add_argument("--cycles-per-step", type=int, default=4)
    args = parser.parse_args()
    found = []
    print(f"{args.splits} splits, global batches of {args.splits * args.cycles_per_step} rows; distances in sigmas")
    print(
        "order    clump clumps seed |  batch: met expected  sigmas  variance | 10 batches: met expected  sigmas", end=""
    )
    print("  variance | largest correlation | near expected")
    for quality in qualities(args.splits, args.cycles_per_step):
        found.append(quality)
        seed = "max" if quality.seed >= 2**63 else quality.seed
        line = f"{quality.order:8} {quality.clump:5} {quality.clumps:6} {seed:>4} |"
        for windows in quality.windows:
            line += (
                f" {windows.met:11.2f} {windows.expected:8.2f} {windows.sigmas:+7.2f} {windows.variance_ratio:9.3f} |"
            )
        lag, worst = max(quality.correlations.items(), key=lambda item: abs(item[1]))
        print(f"{line} {worst:+6.2f} ({lag:12}) | {quality.near:6} {quality.near_expected:8.1f}", flush=True)
    sigmas = np.array([s for quality in found for s in quality.sigmas])
    spread = float(np.sqrt((sigmas**2).mean()))
    worst_of_all = float(np.abs(sigmas).max())
    print(f"{len(sigmas)} distances: largest {worst_of_all:.2f}, root mean square {spread:.2f}")
    lines = [
        Line(what="distance from a random order, the largest", unit="sigmas", values=[worst_of_all], at_most=SIGMAS),
        Line(what="distances from a random order, root mean square", unit="sigmas", values=[spread]),
    ]
    save(lines, args.directory / "shuffle_quality.json", [dataclasses.asdict(quality) for quality in found])


if __name__ == "__main__":
    main()
