"""Rows per second over a whole epoch, beside ``lancedb.streaming``, Ray Data and a bare reader, in one run.

    python tests/benchmarks/epoch_rate.py [--directory DIR] [--workloads a b c d] [--repeats 5] [--scale 1.0]

Workloads: (a) 64 float32 and a label, 500,000 rows; (b) 1,024 int32 tokens, 100,000 rows; (c) blobs of 100 kB, 10,000
rows; (d) JPEG images of 224 x 224 that the transform decodes, 4,000 rows. Each is shuffled by row, and in clumps of 64
rows. Batches of 480 rows as torch tensors (blobs as bytes).

Every figure is a process of its own; contenders take turns, after one round that does not count and that chooses the
settings of ``lancedb.streaming`` (workers, read size) that go on: the fastest two. The rate is the
epoch's rows over the seconds from construction to the last batch; with prefetchers the clock starts when the pool is
ready, and ``with start`` counts their start as well. Where Ray was started, its processes have come to rest before.
``bare`` takes blocks of 32 MiB at random from the table and gathers them back into order, on one thread: the ceiling
of one reader. ``one core``: the same on one core alone; and ours with one prefetcher on one core and the consumer on
another one, so that what Ray and the consumer cost shows. Memory is the sum of the peaks of the
processes (resident, less what they share), sampled.

Prints medians with the least and the most, and writes ``epoch_rate.json`` and ``epoch_rate.png`` to the directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import lancedb
import numpy as np
import psutil
import pyarrow as pa

BATCH, SPLITS, SEED = 480, 48, 3
ROWS = {"a": 500_000, "b": 100_000, "c": 10_000, "d": 4_000}
ORDERS = {"row": None, "clump 64": 64}
LANCEDB = [f"lancedb.streaming {workers}w {size}" for workers in (0, 2) for size in (64, 256, 1024)]
PINNED = ["bare, one core", "ours, one core each"]
CONTENDERS = ["bare", "ours", "ours, in process", *PINNED, *LANCEDB, "ray data", "ray data, shuffled"]
BLOCK_BYTES = 32 * 2**20
Batches = Iterator[Any]


# ------------------------------------------------------------------ tables


def rows_of(workload: str, start: int, count: int) -> pa.RecordBatch:
    """Makes rows of a workload; the same for the same numbers."""
    rng = np.random.default_rng(start)
    label = np.arange(start, start + count)
    x: Any
    if workload == "a":
        x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(count * 64, dtype=np.float32)), 64)
    elif workload == "b":
        tokens = rng.integers(0, 50_000, count * 1024, dtype=np.int32)
        x = pa.FixedSizeListArray.from_arrays(pa.array(tokens), 1024)
    elif workload == "c":
        x = pa.array([rng.bytes(100_000) for _ in range(count)], pa.binary())
    else:
        x = pa.array([_jpeg(rng) for _ in range(count)], pa.binary())
    return pa.record_batch({"x": x, "label": label})


def _jpeg(rng: np.random.Generator) -> bytes:
    import io

    from PIL import Image

    small = rng.integers(0, 255, (14, 14, 3), dtype=np.uint8)  # smooth, as photographs are
    out = io.BytesIO()
    Image.fromarray(small).resize((224, 224), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def decode(batch: pa.RecordBatch) -> dict[str, Any]:
    """Decodes JPEG images to arrays of (rows, 224, 224, 3)."""
    import io

    from PIL import Image

    images = [np.asarray(Image.open(io.BytesIO(data.as_py()))) for data in batch["x"]]
    return {"x": np.stack(images), "label": batch["label"]}


def ensure_table(directory: str, workload: str, rows: int) -> str:
    """Writes a workload's table unless it is there."""
    name, chunk = f"{workload}{rows}", {"a": 100_000, "b": 20_000}.get(workload, 500)
    if not Path(directory, f"{name}.lance").exists():
        parts = (rows_of(workload, start, min(chunk, rows - start)) for start in range(0, rows, chunk))
        first = rows_of(workload, 0, 1)
        lancedb.connect(directory).create_table(name, parts, schema=first.schema)
    return name


# ------------------------------------------------------------------ contenders: each yields (rows, batch)


def bare(directory: str, name: str, clump: int | None, transform: Callable[..., Any] | None) -> Batches:
    """One thread that reads blocks in random order and gathers them."""
    import lance

    dataset = lance.dataset(str(Path(directory, f"{name}.lance")))
    count, rng = dataset.count_rows(), np.random.default_rng(SEED)
    order = rng.permutation(count) if clump is None else _clumps(rng, count, clump)
    row_bytes = dataset.take([0, 1, 2]).nbytes / 3
    size = max(BATCH, int(BLOCK_BYTES / row_bytes))
    for start in range(0, count, size):
        rows = order[start : start + size]
        ordered = np.argsort(rows, kind="stable")
        back = np.empty_like(ordered)
        back[ordered] = np.arange(len(rows))
        table = dataset.take(rows[ordered].tolist()).take(pa.array(back)).combine_chunks()
        block = table if transform is None else transform(table.to_batches()[0])
        yield len(rows), block


def _clumps(rng: np.random.Generator, count: int, clump: int) -> Any:
    starts = rng.permutation(-(-count // clump)) * clump
    rows = (starts[:, None] + np.arange(clump)).ravel()
    return rows[rows < count]


def ours(stream_args: dict[str, Any], ready: Callable[[], None]) -> Batches:
    """Our stream, with whatever prefetchers the process has Ray for."""
    from ray_lance_stream import LanceStream

    stream = LanceStream(num_splits=SPLITS, global_batch_size=BATCH, shuffle_seed=SEED, **stream_args)
    with stream.open() as shard:
        ready()
        for batch in shard.iter_torch_batches():
            yield len(batch["label"]), batch


def lancedb_streaming(
    directory: str, name: str, clump: int | None, transform: Callable[..., Any] | None, workers: int, read_size: int
) -> Batches:
    """LanceDB's own classes."""
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        lancedb.connect(directory).open_table(name),
        num_splits=SPLITS,
        shuffle_seed=SEED,
        shuffle_clump_size=clump,
        read_batch_size=read_size,
        transform=transform,
    )
    for batch in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers):
        yield len(batch["label"]), batch


def ray_data(directory: str, name: str, transform: Callable[..., Any] | None, *, shuffled: bool) -> Batches:
    """Ray Data's reader; shuffled, it holds the whole table in its object store."""
    import ray.data

    dataset = ray.data.read_lance(str(Path(directory, f"{name}.lance")))
    dataset = dataset.random_shuffle(seed=SEED) if shuffled else dataset
    if transform is not None:
        decoding = transform
        dataset = dataset.map_batches(lambda table: decoding(table.to_batches()[0]), batch_format="pyarrow")
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
        yield len(batch["label"]), batch


# ------------------------------------------------------------------ one measurement, in a process of its own


def measure(contender: str, directory: str, name: str, workload: str, clump: int | None) -> dict[str, float]:
    """Reads one epoch; returns seconds, rows and bytes."""
    import torch  # noqa: F401  (a trainer has it loaded)

    from ray_lance_stream import PrefetchConfig

    transform = decode if workload == "d" else None
    began: list[float] = []
    resting_s = 0.0
    ray_runs = contender.startswith(("ours", "ray data")) and contender != "ours, in process"

    def ready() -> None:
        nonlocal resting_s
        if ray_runs:
            before = time.perf_counter()
            wait_for_rest()
            resting_s = time.perf_counter() - before
        if contender == PINNED[1]:
            pin(psutil.Process(), 1)
            for process in psutil.Process().children(recursive=True):
                if process.name().startswith("ray::Prefetch"):
                    pin(process, 0)
        began.append(time.perf_counter())

    if ray_runs:
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        wait_for_rest()
    start = time.perf_counter()
    if contender.startswith("bare"):
        if contender in PINNED:
            pin(psutil.Process(), 0)
        batches = bare(directory, name, clump, transform)
    elif contender.startswith("ours"):
        args: dict[str, Any] = {"uri": directory, "table": name, "shuffle_clump_size": clump, "transform": transform}
        if contender in PINNED:
            args["prefetch"] = PrefetchConfig(num_actors=1)
        batches = ours(args, ready)
    elif contender.startswith("ray data"):
        batches = ray_data(directory, name, transform, shuffled=contender.endswith("shuffled"))
    else:
        workers, size = contender.split()[1:]
        batches = lancedb_streaming(directory, name, clump, transform, int(workers[:-1]), int(size))
    peak = _Peak()
    rows, first = 0, 0.0
    for count, _ in batches:
        first = first or time.perf_counter()
        rows += count
    done = time.perf_counter()
    since = began[0] if began else start
    return {
        "rows": rows,
        "seconds": done - since,
        "with_start": done - start - resting_s,
        "first_batch": first - since,
        "peak_bytes": peak.stop(),
    }


def pin(process: psutil.Process, core: int) -> None:
    """Has a process's threads, and those they start, run on one core."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def wait_for_rest() -> None:
    """Waits until the processes that this one has started have used less than a fifth of a CPU for a second."""
    used = _cpu_s()
    for _ in range(60):
        time.sleep(1.0)
        before, used = used, _cpu_s()
        if used - before < 0.2:
            return
    raise TimeoutError(f"Ray does not come to rest: it used {used - before:.2f} CPUs in the last second")


def _cpu_s() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class _Peak:
    """Samples the memory of this process and of those it has started."""

    def __init__(self) -> None:
        self._most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    memory = process.memory_info()
                except psutil.Error:
                    continue
                total += memory.rss - memory.shared
            self._most = max(self._most, total)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._most


# ------------------------------------------------------------------ the run


def run_one(args: argparse.Namespace, contender: str, workload: str, order: str) -> dict[str, float] | None:
    """Measures in a new process; None, with the reason on stderr, if it fails."""
    command = [sys.executable, __file__, "--directory", args.directory, "--scale", str(args.scale)]
    command += ["--one", contender, workload, order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, check=False)
    if done.returncode:
        print(f"{contender}, {workload}, {order}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(args: argparse.Namespace, workload: str, order: str) -> dict[str, list[dict[str, float]]]:
    """Lets the contenders take turns; the first round does not count."""
    contenders = [name for name in args.contenders if order == "row" or not name.startswith("ray data")]
    trial = {name: run_one(args, name, workload, order) for name in contenders}  # Ray Data knows no clumps
    seconds = {name: result["seconds"] for name, result in trial.items() if result is not None}
    slow = sorted((name for name in seconds if name in LANCEDB), key=lambda name: seconds[name])[2:]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in seconds if name not in slow}
    for _ in range(args.repeats):
        for contender, runs in found.items():
            result = run_one(args, contender, workload, order)
            if result is not None:
                runs.append(result)
    return {name: runs for name, runs in found.items() if runs}


def show(workload: str, order: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Prints a table; rates in rows/s, and each contender's ratio to ours."""
    rate = {name: statistics.median(r["rows"] / r["seconds"] for r in runs) for name, runs in found.items()}
    best = max((name for name in rate if name.startswith("lancedb")), key=lambda name: rate[name], default=None)
    print(f"\n({workload}) shuffled by {order}")
    print(f"  {'':28} {'rows/s':>32} {'ours is':>8} {'with start':>11} {'first batch, s':>15} {'peak, MiB':>10}")
    for name, runs in found.items():
        if name.startswith("lancedb") and name != best:
            continue
        rates = [r["rows"] / r["seconds"] for r in runs]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        spread = f"{rate[name]:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        ratio = f"{rate['ours'] / rate[name]:.2f}x" if "ours" in rate else ""
        print(
            f"  {name:28} {spread:>32} {ratio:>8} {middle['rows'] / middle['with_start']:>11,.0f} "
            f"{middle['first_batch']:>15.3f} {middle['peak_bytes'] / 2**20:>10,.0f}"
        )


def draw(results: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    """Draws the medians, with the least and the most, one panel for each workload and order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(results), 1, figsize=(8, 2.4 * len(results)), squeeze=False)
    for panel, (title, found) in zip(panels[:, 0], results.items(), strict=True):
        rates = {name: [r["rows"] / r["seconds"] for r in runs] for name, runs in found.items()}
        middle = {name: statistics.median(several) for name, several in rates.items()}
        spread = [[middle[n] - min(rates[n]) for n in rates], [max(rates[n]) - middle[n] for n in rates]]
        colors = ["C1" if name.startswith("ours") else "C0" for name in rates]
        panel.barh(list(rates), list(middle.values()), xerr=spread, color=colors)
        panel.set_xlabel("rows/s over the epoch")
        panel.set_title(title)
        panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--workloads", nargs="+", choices=sorted(ROWS), default=["a", "b", "c", "d"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows, to try it out")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "WORKLOAD", "ORDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    if args.one:
        contender, workload, order = args.one
        name = ensure_table(args.directory, workload, int(ROWS[workload] * args.scale))
        print(json.dumps(measure(contender, args.directory, name, workload, ORDERS[order])))
        return
    for workload in args.workloads:
        ensure_table(args.directory, workload, int(ROWS[workload] * args.scale))
    print(f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    results = {}
    for workload in args.workloads:
        for order in ORDERS:
            found = results[f"({workload}) by {order}"] = compare(args, workload, order)
            show(workload, order, found)
    Path(args.directory, "epoch_rate.json").write_text(json.dumps(results, indent=1))
    draw(results, Path(args.directory, "epoch_rate.png"))


if __name__ == "__main__":
    main()
