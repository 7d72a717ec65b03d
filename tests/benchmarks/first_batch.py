"""How long constructing a stream and getting its first batch take, by rows and by data files of the table.

    python tests/benchmarks/first_batch.py [--directory DIR] [--repeats 5]

Tables of 64 float32 values per row; 48 splits, global batches of 480 rows, default settings otherwise. The
clock for the first batch starts when the prefetchers are there, the shard is open and the machine is idle again
(starting actors makes Ray start others), and stops when ``next()`` has returned the batch as torch tensors. The
tables are in the page cache, so that the disk is not what is compared. Medians, with the least and the most, after
one warm-up; ``bare take`` is the same number of random rows read by one process that has the table open, the floor
of what a first batch can cost. A table of LanceDB has a file for every million rows or write: rows and files are
varied apart.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import lance
import numpy as np
import psutil
import pyarrow as pa
import ray
import torch  # noqa: F401  (a trainer has it loaded)

from ray_lance_stream import LanceStream

WIDTH = 64
BATCH = 480
CHUNK = 250_000
SIZES = ((500_000, 1), (5_000_000, 1), (500_000, 5), (5_000_000, 5))  # rows, files


def ensure_table(uri: str, rows: int, files: int) -> str:
    """Writes a table of so many rows in so many files, unless it is there."""
    name = f"rows{rows}x{files}"
    if not Path(uri, f"{name}.lance").exists():
        rng = np.random.default_rng(0)

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, rows, CHUNK):
                count = min(CHUNK, rows - start)
                values = pa.array(rng.random(count * WIDTH, dtype=np.float32))
                x = pa.FixedSizeListArray.from_arrays(values, WIDTH)
                yield pa.record_batch({"x": x, "y": pa.array(np.arange(start, start + count))})

        schema = pa.schema({"x": pa.list_(pa.float32(), WIDTH), "y": pa.int64()})
        reader = pa.RecordBatchReader.from_batches(schema, batches())
        lance.write_dataset(reader, Path(uri, f"{name}.lance"), max_rows_per_file=rows // files)
    return name


def load_files(uri: str, name: str) -> None:
    """Brings a table's files into the page cache."""
    for path in Path(uri, f"{name}.lance").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def wait_until_idle(below_percent: float = 15.0, samples: int = 3) -> None:
    """Waits until the processors have been idle for a second."""
    seen = 0
    while seen < samples:
        seen = seen + 1 if psutil.cpu_percent(0.3) < below_percent else 0


def bare_take_s(uri: str, name: str, seed: int) -> float:
    """Returns the seconds one take of a batch's rows costs where the table is open and has been read from."""
    dataset = lance.dataset(str(Path(uri, f"{name}.lance")))
    rng = np.random.default_rng(seed)
    for _ in range(4):
        rows = np.sort(rng.choice(dataset.count_rows(), BATCH, replace=False)).tolist()
        began = time.perf_counter()
        dataset.take(rows)
        took = time.perf_counter() - began
    return took


def measure(uri: str, name: str) -> tuple[float, float, float]:
    """Returns (seconds to construct the stream, seconds to the first batch, seconds of a bare take)."""
    began = time.perf_counter()
    seed = int(began * 1e6) % 2**32
    stream = LanceStream(uri, name, num_splits=48, global_batch_size=BATCH, shuffle_seed=seed)
    constructed = time.perf_counter()
    with stream.open() as shard:
        wait_until_idle()
        began_reading = time.perf_counter()
        batches = iter(shard.iter_torch_batches())  # held: dropping it would end its thread on the clock
        batch = next(batches)
        done = time.perf_counter()
        assert batch["x"].shape == (BATCH, WIDTH)
        del batches
    return constructed - began, done - began_reading, bare_take_s(uri, name, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    tables = {ensure_table(args.directory, *size): size for size in SIZES}
    for name in tables:
        load_files(args.directory, name)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in tables}
    for repeat in range(args.repeats + 1):
        for name in tables:
            result = measure(args.directory, name)
            if repeat:
                found[name].append(result)
    ray.shutdown()
    print(f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'rows':>12} {'files':>6} {'construct, ms':>24} {'first batch, ms':>24} {'bare take, ms':>24}")
    for name, results in found.items():
        shown = []
        for values in zip(*results, strict=True):
            shown.append(f"{statistics.median(values) * 1e3:.0f} ({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})")
        rows, files = tables[name]
        print(f"{rows:>12,} {files:>6} {shown[0]:>24} {shown[1]:>24} {shown[2]:>24}")


if __name__ == "__main__":
    main()
