"""What a consumer waits and works for a batch: when data are ready, and how much Python a batch costs.

    python tests/benchmarks/waits.py [--directory DIR] [--rows 500000] [--repeats 5]

64 float32 and a label a row, shuffled by row, global batches of 480 rows as torch tensors, default settings, two
prefetchers.

``waits``: first one epoch as fast as it goes, which is the pool's capacity here; then one whose consumer takes as long
for every batch as makes its demand half of that: how long ``next()`` takes then, all batches of the epoch counted.
Beside it how much later than asked for the consumer wakes from its pauses, while the same processes work on the same
cores: a wait that is no longer than that is no wait for data.
``consumer``: time that the consumer's thread works for a batch (its processor time), with batches made where they are
asked for (``prefetch_batches=0``) and one after the other, and the same for a bare copy of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import ray
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show
from benchmarks.workloads import ensure_table

from ray_lance_stream import LanceStream

BATCH, SPLITS = 480, 48
P99_S = 0.001
PYTHON_S = 100e-6
DEMAND = 0.5  # of the capacity


def epoch_s(shard: Any) -> tuple[float, int]:
    """Reads an epoch as fast as it goes; returns seconds a batch, and how many there were."""
    began, count = time.perf_counter(), 0
    for _ in shard.iter_torch_batches():
        count += 1
    return (time.perf_counter() - began) / count, count


def waits_s(shard: Any, pause_s: float) -> tuple[list[float], list[float]]:
    """Reads an epoch, with a pause for each batch; returns how long each took to come, and how late pauses ended."""
    found, late = list[float](), list[float]()
    batches = iter(shard.iter_torch_batches())
    due = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if next(batches, None) is None:
            return found, late
        found.append(time.perf_counter() - asked)
        due = max(due, asked) + pause_s
        if due > time.perf_counter():
            time.sleep(due - time.perf_counter())
            late.append(time.perf_counter() - due)


def work_s(shard: Any) -> tuple[float, float]:
    """Returns the processor time of the consumer's thread for a batch, and of a bare copy of it: medians."""
    found, copies = [], []
    batches = iter(shard.iter_torch_batches(prefetch_batches=0))
    for _ in range(200):
        began = time.thread_time()
        batch = next(batches)
        found.append(time.thread_time() - began)
        began = time.thread_time()
        for tensor in batch.values():
            torch.empty_like(tensor).copy_(tensor)
        copies.append(time.thread_time() - began)
    return float(np.median(found)), float(np.median(copies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    name = ensure_table(args.directory, "a", args.rows)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    stream = LanceStream(args.directory, name, num_splits=SPLITS, global_batch_size=BATCH)
    shares: list[float] = []
    halves, p99, late_p99, work, beyond = (list[float]() for _ in range(5))
    with stream.open() as shard:
        epoch_s(shard)  # a warm-up
        for _ in range(args.repeats):
            capacity_s, _ = epoch_s(shard)
            waits, late = waits_s(shard, capacity_s / DEMAND)
            halves.append(1e3 * float(np.median(waits)))
            p99.append(1e3 * float(np.quantile(waits, 0.99)))
            late_p99.append(1e3 * float(np.quantile(late, 0.99)))
            shares.append(sum(wait > P99_S for wait in waits) / len(waits))
        for _ in range(args.repeats):
            made, copied = work_s(shard)
            work.append(1e6 * made)
            beyond.append(1e6 * (made - copied))
            for _ in shard.iter_torch_batches():  # the rest of the epoch
                pass
    ray.shutdown()
    lines = [
        Line(what="wait for a batch at half of the pool's capacity, median", unit="ms", values=halves),
        Line(what="the same, 99 of 100", unit="ms", values=p99, at_most=1e3 * P99_S),
        Line(what="batches that came later than 1 ms", unit="of all", values=shares),
        Line(what="how late the consumer wakes from a pause, 99 of 100", unit="ms", values=late_p99),
        Line(what="processor time of the consumer for a batch", unit="us", values=work),
        Line(what="the same, beyond a bare copy of it", unit="us", values=beyond, at_most=1e6 * PYTHON_S),
    ]
    show(lines)
    save(lines, Path(args.directory, "waits.json"))


if __name__ == "__main__":
    main()
