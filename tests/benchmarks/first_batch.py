"""How long constructing a stream and getting its first batch take, by rows and by data files of the table.

    python tests/benchmarks/first_batch.py [--directory DIR] [--repeats 5]

Tables of 64 float32 values per row and, so that they can be long, of one int32 ("narrow"); 48 splits, global batches
of 480 rows, default settings otherwise. The clock for the first batch starts when the prefetchers are there, the shard
is open and the machine is idle again (starting actors makes Ray start others), and stops when ``next()`` has returned
the batch as torch tensors. The tables are in the page cache, so that the disk is not what is compared. Medians, with
the least and the most, after one warm-up; ``bare take`` is the same number of random rows read by one process that has
the table open, the floor of what a first batch can cost. A table of LanceDB has a file for every million rows or
write: rows and files are varied apart. The first table is also resumed at 90 % of an epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import lance
import numpy as np
import psutil
import pyarrow as pa
import ray
import torch  # noqa: F401  (a trainer has it loaded)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show

from ray_lance_stream import LanceStream
from ray_lance_stream.state import StreamState

WIDTH = 64
BATCH, SPLITS = 480, 48
FIRST_BATCH_S = 0.1
CHUNK = 250_000
SIZES = (  # rows, files, float32 values of a row: none is one int32
    (500_000, 1, WIDTH),
    (5_000_000, 1, WIDTH),
    (500_000, 5, WIDTH),
    (5_000_000, 5, WIDTH),
    (500_000, 1, 0),
    (100_000_000, 1, 0),
    (100_000_000, 100, 0),
)


def ensure_table(uri: str, rows: int, files: int, width: int) -> str:
    """Writes a table of so many rows in so many files, unless it is there."""
    name = f"rows{rows}x{files}" if width else f"narrow{rows}x{files}"
    if not Path(uri, f"{name}.lance").exists():
        rng = np.random.default_rng(0)

        def batches() -> Iterator[pa.RecordBatch]:
            for start in range(0, rows, CHUNK):
                count = min(CHUNK, rows - start)
                if not width:
                    yield pa.record_batch({"x": pa.array(np.arange(start, start + count, dtype=np.int32))})
                    continue
                values = pa.array(rng.random(count * width, dtype=np.float32))
                x = pa.FixedSizeListArray.from_arrays(values, width)
                yield pa.record_batch({"x": x, "y": pa.array(np.arange(start, start + count))})

        wide = pa.schema({"x": pa.list_(pa.float32(), width), "y": pa.int64()})
        schema = wide if width else pa.schema({"x": pa.int32()})
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


def measure(uri: str, name: str, width: int, begin: float = 0.0) -> tuple[float, float, float]:
    """Returns (seconds to construct the stream, seconds to the first batch, seconds of a bare take).

    Args:
        uri: The database.
        name: The table.
        width: Values of each of its rows, 0 for one that is no list.
        begin: Which part of the epoch the stream's state says is done.
    """
    seed = int(time.perf_counter() * 1e6) % 2**32
    options: dict[str, Any] = {"num_splits": SPLITS, "global_batch_size": BATCH, "shuffle_seed": seed}
    if begin:
        steps = int(begin * lance.dataset(str(Path(uri, f"{name}.lance"))).count_rows()) // BATCH
        reads = LanceStream(uri, name, **options).config.provenance
        options["resume_from"] = StreamState.at_cycle(reads, 0, steps * (BATCH // SPLITS)).to_dict()
    began = time.perf_counter()
    stream = LanceStream(uri, name, **options)
    constructed = time.perf_counter()
    with stream.open() as shard:
        wait_until_idle()
        began_reading = time.perf_counter()
        batches = iter(shard.iter_torch_batches())  # held: dropping it would end its thread on the clock
        batch = next(batches)
        done = time.perf_counter()
        assert batch["x"].shape == ((BATCH, width) if width else (BATCH,))
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
    cases = [(name, 0.0) for name in tables] + [(next(iter(tables)), 0.9)]
    found: dict[tuple[str, float], list[tuple[float, ...]]] = {case: [] for case in cases}
    for repeat in range(args.repeats + 1):
        for case in cases:
            name, begin = case
            result = measure(args.directory, name, tables[name][2], begin)
            if repeat:
                found[case].append(result)
    ray.shutdown()
    lines = []
    for (name, begin), results in found.items():
        rows, files, width = tables[name]
        title = f"{rows:,} {'rows' if width else 'narrow rows'} in {files} file{'s' * (files > 1)}"
        title += f", resumed at {begin:.0%}" if begin else ""
        constructs, batches, takes = ([1e3 * value for value in values] for values in zip(*results, strict=True))
        lines += [
            Line(what=f"{title}: construction", unit="ms", values=constructs),
            Line(what=f"{title}: first batch", unit="ms", values=batches, at_most=1e3 * FIRST_BATCH_S),
            Line(what=f"{title}: a bare take of as many rows", unit="ms", values=takes),
        ]
    show(lines)
    save(lines, Path(args.directory, "first_batch.json"))


if __name__ == "__main__":
    main()
