"""How long constructing a ``StreamingDataset`` and getting its first row take, beside LanceDB's own class.

    python tests/benchmarks/first_row.py [--directory DIR] [--rows 1000000] [--splits 64] [--repeats 5]

One process, no Ray. LanceDB's class is measured once (it takes seconds), ours ``--repeats`` times after one warm-up,
with LanceDB's order and with our own: medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.streaming import StreamingDataset as LanceDBDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show

from ray_lance_stream import StreamingDataset


def first_row_s(make: Any, table: Any, **options: Any) -> float:
    """Returns the seconds from construction to the first row."""
    began = time.perf_counter()
    dataset = make(table, **options)
    rows = iter(dataset)
    next(rows)
    took = time.perf_counter() - began
    rows.close()
    if isinstance(dataset, StreamingDataset):
        dataset.close()  # or it would read ahead beside the next one
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--splits", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    database, name = lancedb.connect(args.directory), f"narrow{args.rows}"
    if not Path(args.directory, f"{name}.lance").exists():
        ids = np.arange(args.rows)
        database.create_table(name, pa.table({"id": ids, "x": np.random.default_rng(0).random(args.rows)}))
    table = database.open_table(name)
    lines = []
    for order in ("lancedb", "feistel"):
        found = [
            first_row_s(StreamingDataset, table, num_splits=args.splits, shuffle_seed=seed, order=order)
            for seed in range(args.repeats + 1)
        ][1:]
        lines.append(Line(what=f"{args.rows:,} rows: first row, order={order!r}", unit="s", values=found))
    theirs = first_row_s(LanceDBDataset, table, num_splits=args.splits)
    lines.append(Line(what=f"{args.rows:,} rows: first row, lancedb.streaming", unit="s", values=[theirs]))
    show(lines)
    save(lines, Path(args.directory, "first_row.json"))


if __name__ == "__main__":
    main()
