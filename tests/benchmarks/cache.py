"""What ``PrefetchConfig(cache_bytes=...)`` does for a table on an object store: rows/s of the epochs, with and without.

    python tests/benchmarks/cache.py [--rows 50000] [--epochs 3] [--repeats 3] [--latency-ms 20]

A server of the S3 protocol on this machine, with latency put in front of every read of data. 64 float32 and a label a
row, shuffled by row, 8 data files; one process, without Ray. Prints the medians, with the least and the most, of each
epoch's rate, the part of its rows that the disk gave, and the rate of a bare reader.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa

from ray_lance_stream import LanceStream, PrefetchConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show
from stores import Fault, Seen, store

FILES, SPLITS, BATCH = 8, 48, 480
MIB = 1024 * 1024


def epochs(options: dict[str, str], count: int, **cache: Any) -> list[tuple[float, float]]:
    """Reads so many epochs; returns each one's rows/s, and which part of its rows the disk gave."""
    from ray_lance_stream.local import LocalLink
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.topology import Seat

    stream = LanceStream(
        "s3://tables/db",
        "t",
        storage_options=options,
        num_splits=SPLITS,
        global_batch_size=BATCH,
        prefetch=PrefetchConfig(**cache),
    )
    found: list[tuple[float, float]] = []
    with StreamShard(stream.config, Seat(), LocalLink(stream.recipe)) as shard:
        source: Any = shard._source
        for _ in range(count):
            kept, began = source._builder.tables.rows_kept, time.perf_counter()
            rows = sum(len(batch["label"]) for batch in shard.iter_batches())
            found.append((rows / (time.perf_counter() - began), (source._builder.tables.rows_kept - kept) / rows))
    return found


def bare_rate(options: dict[str, str]) -> float:
    """Rows/s of one thread that takes blocks of random rows: the ceiling of one reader on this store."""
    dataset = lance.dataset("s3://tables/db/t.lance", storage_options=options)
    rows = np.random.default_rng(0).permutation(dataset.count_rows())
    size = 32 * MIB // (64 * 4 + 8)
    began = time.perf_counter()
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        order = np.argsort(part)
        dataset.take(part[order].tolist()).take(np.argsort(order)).combine_chunks()
    return len(rows) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    args = parser.parse_args()
    late = Fault(status=None, delay_s=args.latency_ms / 1000)

    def latency(seen: Seen) -> Fault | None:
        return late if seen.method == "GET" and "/data/" in seen.path else None

    with store() as running:
        running.make_bucket("tables")
        options = running.options()
        rng, per_file = np.random.default_rng(0), args.rows // FILES
        connection = lancedb.connect("s3://tables/db", storage_options=options)
        for k in range(FILES):
            x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(per_file * 64, dtype=np.float32)), 64)
            columns = pa.table({"x": x, "label": np.arange(k * per_file, (k + 1) * per_file)})
            connection.open_table("t").add(columns) if k else connection.create_table("t", columns)
        running.fault = latency
        lines: list[Line] = []
        found = [bare_rate(options) for _ in range(args.repeats)]
        lines.append(Line(what="a bare loop over take in blocks of 32 MiB, one thread", unit="rows/s", values=found))
        for name, size in (("without", 0), ("with", 1024 * MIB)):
            runs = []
            for _ in range(args.repeats):
                with tempfile.TemporaryDirectory() as directory:
                    runs.append(epochs(options, args.epochs, cache_bytes=size, cache_dir=directory))
            for epoch in range(args.epochs):
                rates, shares = zip(*(run[epoch] for run in runs), strict=True)
                lines.append(Line(what=f"{name} a cache, epoch {epoch}", unit="rows/s", values=rates))
                if size:
                    lines.append(
                        Line(what=f"{name} a cache, epoch {epoch}: rows from the disk", unit="", values=shares)
                    )
    show(lines)
    save(lines, Path(args.directory, "cache.json"))


if __name__ == "__main__":
    main()
