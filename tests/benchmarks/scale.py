"""Whether state and plan keep their size and speed at 1,024 replicas, 8,192 splits and 10**12 rows.

    python tests/benchmarks/scale.py [--directory DIR] [--repeats 5]

One process, no Ray, no table. Times are medians of ``--repeats`` runs after one that does not count. Prints one table
of targets and what was measured, and writes the same as JSON; ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show

from ray_lance_stream.checkpoint import FILE_NAME, locate, read_streams, write_streams
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, TableIdentity
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.rownumbers import RowNumbers, gathered
from ray_lance_stream.state import StreamState, merge_state_dicts, merge_states
from ray_lance_stream.topology import Replica

SPLITS, REPLICAS, ROWS, POSITIONS = 8192, 1024, 10**12, 10**6
CYCLE = 10**9
TABLE = TableIdentity(version=17, fingerprint="0123456789abcdef" * 2)


def seconds(function: Callable[[], object], repeats: int) -> list[float]:
    """The processor times of calls, to which other work on the machine adds little."""
    function()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return found


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that Python and numpy hold at one time for a call, its result included."""
    tracemalloc.start()
    try:
        kept = function()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del kept
    return peak


def state_with(ahead: dict[int, int]) -> StreamState:
    """A state at a step's end in which splits have left so many rows out."""
    state = StreamState.at_cycle(Provenance(table=TABLE, order=OrderSpec(num_splits=SPLITS)), 3, CYCLE)
    positions = SplitCounts.of([CYCLE + ahead.get(split, 0) for split in range(SPLITS)])
    return dataclasses.replace(state, positions=positions)


def states(repeats: int) -> Iterator[Line]:
    """State dicts, merging, and the checkpoint's file."""
    draw = np.random.default_rng(0)
    few = {int(split): int(draw.integers(1, 100)) for split in draw.choice(SPLITS, 40, replace=False)}
    every = {split: int(draw.integers(1, 10**6)) for split in range(SPLITS)}
    cases = {"no row skipped": {}, "skips in 40 splits": few, "skips in all splits": every}
    for name, ahead in cases.items():
        state = state_with(ahead)
        # Lists as LanceDB has them: where all counts differ, making 8,192 numbers takes longer by itself.
        target = 100.0 if ahead is not every else None
        times = [1e6 * took for took in seconds(state.to_dict, 20 * repeats)]
        yield Line(what=f"state_dict(), {name}", unit="us", at_most=target, values=times)
    for name, ahead in cases.items():
        with tempfile.TemporaryDirectory() as directory:
            write_streams(*locate(directory), {"train": state_with(ahead)})
            assert read_streams(*locate(directory)) == {"train": state_with(ahead)}
            size = Path(directory, FILE_NAME).stat().st_size
        yield Line(what=f"checkpoint file, {name}", unit="bytes", at_most=100_000, values=[size])
    for name, whole in (("no row skipped", {}), ("skips in all splits", every)):
        sent = [pickle.dumps(state_with(_owned(whole, rank))) for rank in range(REPLICAS)]
        assert _collect(sent) == state_with(whole)
        times = [1e3 * took for took in seconds(functools.partial(_collect, sent), repeats)]
        yield Line(what=f"collect and merge 1,024 replicas, {name}", unit="ms", at_most=50, values=times)
        size = max(map(len, sent))
        yield Line(what=f"what a replica sends at a step's end, {name}", unit="bytes", values=[size])
    dicts = [state_with(_owned(every, rank)).to_dict() for rank in range(REPLICAS)]
    times = [1e3 * took for took in seconds(lambda: merge_state_dicts(dicts), 1)]
    yield Line(what="merge_state_dicts of 1,024 dicts", unit="ms", values=times)


def _collect(sent: list[bytes]) -> StreamState:
    return merge_states([pickle.loads(state) for state in sent])


def _owned(whole: dict[int, int], rank: int) -> dict[int, int]:
    own = Replica(dp_rank=rank, dp_size=REPLICAS).owned_splits(SPLITS)
    return {split: whole[split] for split in own if split in whole}


def plans(repeats: int) -> Iterator[Line]:
    """Random positions of a plan of 10**12 rows, and what it holds."""
    draw = np.random.default_rng(0)
    for clump in (1, 64, 1024):
        order = OrderSpec(num_splits=SPLITS, shuffle_seed=7, shuffle_clump_size=clump)
        plan = Plan(PlanSpec(table=TABLE, order=order, epoch=1), ROWS)
        splits = draw.integers(0, SPLITS, POSITIONS)
        positions = draw.integers(0, plan.layout.rows_per_split, POSITIONS)
        took = seconds(functools.partial(plan.rows, splits, positions), repeats)
        yield Line(what=f"10**6 positions of 10**12 rows, clump {clump}", unit="s", at_most=1.0, values=took)
    order = OrderSpec(num_splits=SPLITS)
    made = peak_bytes(lambda: Plan(PlanSpec(table=TABLE, order=order, epoch=1), ROWS))
    yield Line(what="making the plan of 10**12 rows, no filter", unit="bytes", at_most=100_000, values=[made])


def row_numbers() -> Iterator[Line]:
    """Memory of what a table version's rows are looked up in."""
    fragments, each = 10_000, 100
    sizes, counts = np.full(fragments, 10**8), np.full(fragments, each)
    deleted = (np.arange(fragments)[:, None] * 10**8 + np.arange(each) * 10**5).ravel()
    held = peak_bytes(lambda: RowNumbers(np.arange(fragments), sizes, counts, deleted))
    per = held / (fragments + len(deleted))
    yield Line(what="row numbers: each of 10**4 fragments, 10**6 deleted rows", unit="bytes", at_most=100, values=[per])
    count, part = 10_000_000, 8192
    held = peak_bytes(lambda: gathered(np.arange(begin, begin + part) for begin in range(0, count, part)))
    rows = -(-count // part) * part
    yield Line(what="filter: each matching row, on the way", unit="bytes", at_most=8.6, values=[held / rows])
    numbers = gathered(np.arange(begin, begin + part) for begin in range(0, count, part))
    yield Line(what="filter: each matching row, held", unit="bytes", at_most=8.0, values=[numbers.nbytes / rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("output/benchmarks"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found = [*states(args.repeats), *plans(args.repeats), *row_numbers()]
    show(found)
    save(found, args.directory / "scale.json")
    sys.exit(any(line.missed for line in found))


if __name__ == "__main__":
    main()
