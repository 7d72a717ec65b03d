"""How long constructing a stream and getting its first batch take, at two table sizes.

    python tests/benchmarks/first_batch.py [--directory DIR] [--repeats 5]

Tables of 64 float32 values per row; 48 splits, global batches of 480 rows, default settings otherwise. The
clock for the first batch starts when the prefetchers are there and the shard is open, and stops when
``next()`` has returned the batch as torch tensors. Medians, with the least and the most, after one warm-up.
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

import lancedb
import numpy as np
import pyarrow as pa
import ray
import torch  # noqa: F401  (a trainer has it loaded)

from ray_lance_stream import LanceStream

WIDTH = 64
CHUNK = 250_000


def ensure_table(uri: str, rows: int) -> str:
    """Writes a table of so many rows, unless it is there."""
    name, database = f"rows{rows}", lancedb.connect(uri)
    if not Path(uri, f"{name}.lance").exists():
        rng = np.random.default_rng(0)

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, rows, CHUNK):
                count = min(CHUNK, rows - start)
                values = pa.array(rng.random(count * WIDTH, dtype=np.float32))
                x = pa.FixedSizeListArray.from_arrays(values, WIDTH)
                yield pa.record_batch({"x": x, "y": pa.array(np.arange(start, start + count))})

        schema = pa.schema({"x": pa.list_(pa.float32(), WIDTH), "y": pa.int64()})
        database.create_table(name, batches(), schema=schema)
    return name


def measure(uri: str, rows: int) -> tuple[float, float]:
    """Returns (seconds to construct the stream, seconds to the first batch)."""
    name = ensure_table(uri, rows)
    began = time.perf_counter()
    stream = LanceStream(uri, name, num_splits=48, global_batch_size=480, shuffle_seed=int(began * 1e6) % 2**32)
    constructed = time.perf_counter()
    with stream.open() as shard:
        shard.__enter__()
        began_reading = time.perf_counter()
        batch = next(iter(shard.iter_torch_batches()))
        done = time.perf_counter()
        assert batch["x"].shape == (480, WIDTH)
    return constructed - began, done - began_reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    sizes = (500_000, 5_000_000)
    for rows in sizes:
        ensure_table(args.directory, rows)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    found: dict[int, list[tuple[float, float]]] = {rows: [] for rows in sizes}
    for repeat in range(args.repeats + 1):
        for rows in sizes:
            result = measure(args.directory, rows)
            if repeat:
                found[rows].append(result)
    ray.shutdown()
    print(f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'rows':>12} {'construct, ms':>24} {'first batch, ms':>24}")
    for rows, results in found.items():
        shown = []
        for values in zip(*results, strict=True):
            shown.append(f"{statistics.median(values) * 1e3:.0f} ({min(values) * 1e3:.0f} to {max(values) * 1e3:.0f})")
        print(f"{rows:>12,} {shown[0]:>24} {shown[1]:>24}")


if __name__ == "__main__":
    main()
