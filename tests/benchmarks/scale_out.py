"""How throughput grows with prefetchers where waiting, not this machine's cores, is the limit.

    python tests/benchmarks/scale_out.py [--directory DIR] [--prefetchers 1 2 4 8] [--repeats 3] [--seconds 40]

``transform``: one that waits 5 ms for each row, with default settings. ``read``: 500 ms of latency in front of every
read, in blocks of 64 KiB (64 float32 and a label a row), so that eight prefetchers together use less than one core: a
block of random rows costs 10 to 20 ms of it, and with blocks of the default size no latency shows. Every pool gets as
many rows as it should manage in ``--seconds``; the rate is taken over the middle two thirds of them, so that neither
the first blocks nor the last ones count. Prints the medians of the repeats, with the least and the most, and how much
of linear they are. Blocks of the first case take two seconds and come in turns, so a rate of fewer seconds is one of
luck.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import lancedb
import numpy as np
import pyarrow as pa
import ray

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show

from ray_lance_stream import LanceStream, PrefetchConfig
from ray_lance_stream.cluster.prefetcher import CONCURRENCY_GROUPS

CASES = ("transform", "read")
SPLITS = BATCH = 48
ROW_S, LATENCY_S = 0.005, 0.5
BLOCK_BYTES = 64 * 1024
ROW_BYTES = 64 * 4 + 8
OF_LINEAR = 0.85


def wait_for_each_row(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A transform that takes its time, and no CPU."""
    time.sleep(ROW_S * batch.num_rows)
    return batch


def slow_reads() -> None:
    """Puts latency in front of every read of a Ray worker's process."""
    from ray_lance_stream.table import PinnedTable

    take = PinnedTable.take

    def late(self: PinnedTable, rows: Any, columns: Any) -> pa.Table:
        time.sleep(LATENCY_S)
        return take(self, rows, columns)

    PinnedTable.take = late  # type: ignore[method-assign]


def ensure_table(directory: Path, rows: int) -> None:
    """Writes a table of so many rows, unless it is there."""
    if (directory / f"rows{rows}.lance").exists():
        return
    x = np.random.default_rng(0).random(rows * 64, dtype=np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x), 64), "label": pa.array(np.arange(rows))}
    lancedb.connect(directory).create_table(f"rows{rows}", pa.table(columns))


def rate(directory: Path, case: str, prefetchers: int, seconds: float) -> float:
    """Reads one epoch; returns rows a second over its middle."""
    alone = 1 / ROW_S if case == "transform" else CONCURRENCY_GROUPS["build"] * (BLOCK_BYTES // ROW_BYTES) / LATENCY_S
    rows = int(alone * prefetchers * seconds) // SPLITS * SPLITS
    ensure_table(directory, rows)
    small: dict[str, Any] = {"block_bytes": BLOCK_BYTES} if case == "read" else {}
    stream = LanceStream(
        str(directory),
        f"rows{rows}",
        num_splits=SPLITS,
        global_batch_size=BATCH,
        transform=wait_for_each_row if case == "transform" else None,
        prefetch=PrefetchConfig(num_actors=prefetchers, **small),
    )
    with stream.open() as shard:
        while stream_size(stream) < prefetchers:
            time.sleep(0.2)
        times = [time.perf_counter() for _ in shard.iter_torch_batches()]
    first, last = len(times) // 6, len(times) * 5 // 6
    return (last - first) * BATCH / (times[last] - times[first])


def stream_size(stream: LanceStream) -> int:
    """Returns how many prefetchers have started."""
    return sum(prefetcher.state in ("idle", "building") for prefetcher in stream.stats().prefetchers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("output/benchmarks"))
    parser.add_argument("--prefetchers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for case in args.cases:
        hook: Any = {"worker_process_setup_hook": slow_reads} if case == "read" else None
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=hook)
        alone = 0.0
        for prefetchers in args.prefetchers:
            rates = [rate(args.directory, case, prefetchers, args.seconds) for _ in range(args.repeats)]
            alone = alone or statistics.median(rates) / prefetchers
            shares = [value / prefetchers / alone for value in rates]
            title = f"{case}, {prefetchers} prefetcher{'s' * (prefetchers > 1)}"
            lines.append(Line(what=title, unit="rows/s", values=rates))
            lines.append(Line(what=f"{title}: part of linear", unit="", values=shares, at_least=OF_LINEAR))
            print(lines[-2].text(), lines[-1].text(), sep="\n", flush=True)
        ray.shutdown()
    show(lines)
    save(lines, args.directory / "scale_out.json")


if __name__ == "__main__":
    main()
