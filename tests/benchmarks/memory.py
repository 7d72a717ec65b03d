"""How much memory a stream takes while its consumer sleeps, and while it is slow, beside the budget it was given.

    python tests/benchmarks/memory.py [--directory DIR] [--budget MIB] [--sleep S] [--batches N]

200,000 rows of 64 float32 values and 1 kB of bytes, 250 MiB; 8 splits, global batches of 512 rows, one reader. Each
case runs in a process of its own, reading in process or from two prefetchers. It takes one batch, sleeps while rows
are read ahead, then takes ``--batches`` batches with a pause after each. Printed are, over what there was before the
first batch: the process's resident memory, most and at the end of the sleep; what the reader says it holds; and with
prefetchers the bytes in the object store, and the resident memory that the prefetchers have of their own.

Cases: ``plain``; ``skips``, where the first 20 % of the rows of one split fail, so that splits drift apart;
``grows``, whose transform makes each row ten times as large; ``bursts``, where it does so from some row on: nobody
knows what the blocks will weigh that are being built then, and they overshoot the budget once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import lancedb
import numpy as np
import psutil
import pyarrow as pa
import torch  # noqa: F401  (a trainer has it loaded)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.report import Line, save, show

from ray_lance_stream import LanceStream, PrefetchConfig

MIB = 1024 * 1024
ROWS, WIDTH, PAYLOAD = 200_000, 64, 1024
SPLITS, BATCH = 8, 512
PER_SPLIT = ROWS // SPLITS
CASES = ("plain", "skips", "grows", "bursts")


def ensure_table(uri: str) -> None:
    """Writes the table, unless it is there."""
    if Path(uri, "memory.lance").exists():
        return
    rng, count = np.random.default_rng(0), 20_000

    def batches() -> Any:
        for start in range(0, ROWS, count):
            x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(count * WIDTH, dtype=np.float32)), WIDTH)
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * PAYLOAD).buffers()[1]
            values = pa.py_buffer(rng.bytes(count * PAYLOAD))
            payload = pa.Array.from_buffers(pa.binary(), count, [None, offsets, values])
            yield pa.record_batch({"id": np.arange(start, start + count), "x": x, "payload": payload})

    schema = pa.schema({"id": pa.int64(), "x": pa.list_(pa.float32(), WIDTH), "payload": pa.binary()})
    lancedb.connect(uri).create_table("memory", batches(), schema=schema)


def fail_early(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Fails on the first fifth of the rows of split 3."""
    ids = batch["id"].to_numpy()
    if np.any((ids >= 3 * PER_SPLIT) & (ids < 3 * PER_SPLIT + PER_SPLIT // 5)):
        raise ValueError("a bad row")
    return batch


def grow(batch: pa.RecordBatch, since: int = 0) -> dict[str, Any]:
    """Makes rows from a position on ten times as large."""
    ids = batch["id"].to_numpy()
    times = np.where(ids % PER_SPLIT >= since, 12, 1).tolist()
    payload: list[Any] = batch["payload"].to_pylist()
    return {"id": ids, "payload": [value * n for value, n in zip(payload, times, strict=True)]}


def options_of(case: str) -> dict[str, Any]:
    """What a case adds to the stream's settings."""
    if case == "skips":
        return {"transform": fail_early, "on_transform_error": "skip"}
    if case in ("grows", "bursts"):
        return {"transform": functools.partial(grow, since=1000 if case == "bursts" else 0)}
    return {}


class Sampler:
    """Samples memory on a thread; the most and the last of each number, in bytes."""

    def __init__(self, shard: Any, prefetchers: list[psutil.Process]) -> None:
        self._shard, self._prefetchers = shard, prefetchers
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._base = self._now()
        self.last = self.most = [0] * len(self._base)

    def _now(self) -> list[int]:
        own = self._process.memory_info()
        pool = [process.memory_info() for process in self._prefetchers]
        # Blocks in shared memory are counted once, as bytes of the object store.
        found = [own.rss - own.shared if pool else own.rss, self._shard.stats().buffered_bytes]
        return [*found, store_bytes(), sum(info.rss - info.shared for info in pool)] if pool else found

    def _work(self) -> None:
        while not self._stop.wait(0.05):
            self.last = [now - base for now, base in zip(self._now(), self._base, strict=True)]
            self.most = [max(pair) for pair in zip(self.most, self.last, strict=True)]

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stop.set()
        self._thread.join()


def store_bytes() -> int:
    """Bytes of objects in Ray's store on this node."""
    import ray
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    ask: Any = node_stats  # untyped
    stats = ask(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(stats.store_stats.object_store_bytes_used)


def measure(args: argparse.Namespace) -> None:
    """Runs one case and prints its line."""
    stream = LanceStream(
        args.directory,
        "memory",
        num_splits=SPLITS,
        global_batch_size=BATCH,
        shuffle=False,
        prefetch=PrefetchConfig(max_buffer_bytes=args.budget * MIB),
        **options_of(args.case),
    )
    processes: list[psutil.Process] = []
    if args.pool:
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with stream.open() as shard:
        if args.pool:
            link: Any = shard.link
            processes = [psutil.Process(pid) for _, pid in ray.get(link.session.coordinator.prefetchers.remote())]
        len(shard)  # the plan is open
        sampler = Sampler(shard, processes)
        sampler.start()
        batches = iter(shard.iter_batches())
        next(batches)
        time.sleep(args.sleep)
        asleep = sampler.last
        for _, _ in zip(range(args.batches), batches, strict=False):
            time.sleep(0.02)
        del batches
        sampler.stop()
    title = f"{args.case}, {'from prefetchers' if args.pool else 'in process'}"
    names = ("resident memory of the process", "held by the reader", "object store", "prefetchers' own memory")
    for name, most, end in zip(names, sampler.most, asleep, strict=False):
        bound = None if name.startswith(("resident", "prefetchers")) or args.case == "grows" else args.budget
        print(
            json.dumps(
                dataclasses.asdict(Line(what=f"{title}: {name}, most", unit="MiB", values=[most / MIB], at_most=bound))
            )
        )
        print(json.dumps(dataclasses.asdict(Line(what=f"{title}: {name}, asleep", unit="MiB", values=[end / MIB]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--budget", type=int, default=64, help="MiB")
    parser.add_argument("--sleep", type=float, default=8.0, help="seconds")
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    parser.add_argument("--pool", action="store_true", help="with --case: from prefetchers")
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    ensure_table(args.directory)
    if args.case is not None:
        measure(args)
        return
    lines = []
    same = ["--directory", args.directory, "--budget", str(args.budget), "--sleep", str(args.sleep)]
    for case in CASES:
        for pool in ([], ["--pool"]):
            batches = ["--batches", str(args.batches)]
            command = [sys.executable, __file__, "--case", case, *pool, *same, *batches]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines += [Line(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    show(lines)
    save(lines, Path(args.directory, "memory.json"))


if __name__ == "__main__":
    main()
