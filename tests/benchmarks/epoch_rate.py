"""Rows per second over a whole epoch, beside other readers and a bare one, in one run.

    python tests/benchmarks/epoch_rate.py [--directory DIR] [--workloads a b c d] [--repeats 5] [--scale 1.0]

Workloads: (a) 64 float32 and a label, 500,000 rows; (b) 1,024 int32 tokens, 100,000 rows; (c) blobs of 100 kB, 10,000
rows; (d) JPEG images of 224 x 224 that the transform decodes, 4,000 rows. Each is shuffled by row, and in clumps of 64
rows. Batches of 480 rows as torch tensors (blobs as bytes).

Every figure is a process of its own; contenders take turns, after one round that does not count and that chooses which
settings of a reader go on: of ``lancedb.streaming`` (workers, read size) the fastest, and a second that takes at most a
fifth longer, of others the fastest. A reader that fails there, or is not done within --timeout-s, is named as such. The
rate is the epoch's rows over the seconds from construction to the last batch; with prefetchers the clock starts when
the pool is ready, and ``with start`` counts their start as well, as it is counted of peers' workers in any case. Where
Ray was started, its processes have come to rest before. A ratio is that of a round: ours to what had its turn in the
same round.

``ours, 2nd epoch``: without what only a pool's first epoch costs.

``bare`` takes blocks of 32 MiB at random from the table and gathers them back into order, on one thread: the ceiling
of one reader. ``one core``: one on one core alone, with blocks of the same sizes as ours, which begin smaller; and
ours with one prefetcher on one core and all else on another one, so that what Ray and the consumer cost shows: each in
the second epoch of a process, whose first does not count. Memory is the peak of what the processes hold together
(resident, less what they share) and of what has been added to shared memory, Ray's object store, sampled.

``mosaicml-streaming`` and ``litdata`` read the same rows from files in their own formats. They need other versions of
what we need: --peer-python names the interpreter of an environment with them, lancedb, psutil, Pillow and torch;
without it they are left out. Neither shuffles in clumps. By row, mosaicml-streaming shuffles all rows; beside clumps
it has its default, which shuffles within shards, as litdata always does.

Prints medians with the least and the most, and writes ``epoch_rate.json`` and ``epoch_rate.png`` to the directory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # behind packages: mosaicml-streaming is called as a directory here is
from benchmarks import readers
from benchmarks.report import Line, machine, save, show
from benchmarks.workloads import ROWS, decode, ensure_shards, ensure_table

ORDERS = {"row": None, "clump 64": 64}
LANCEDB = [f"lancedb.streaming {workers}w {size}" for workers in (0, 2) for size in (64, 256, 1024)]
PEERS = [f"{name} {workers}w" for name in ("mosaicml-streaming", "litdata") for workers in (0, 2)]
RAY_DATA = ["ray data", "ray data, shuffled"]
PINNED = ["bare, one core", "ours, one core each"]
SECOND = "ours, 2nd epoch"
CONTENDERS = ["bare", "ours", "ours, in process", SECOND, *PINNED, *LANCEDB, *PEERS, *RAY_DATA]
GO_ON = {"lancedb.streaming": 2, "mosaicml-streaming": 1, "litdata": 1}  # settings of a reader, at most
NEARLY_AS_FAST = 1.2  # times the seconds of the fastest, for a second one to go on
MODULES = {  # loaded before the clock starts
    "bare": "lance",
    "ours": "ray_lance_stream",
    "lancedb.streaming": "lancedb.streaming",
    "ray data": "ray.data",
    "mosaicml-streaming": "streaming",
    "litdata": "litdata",
}
# How many times lancedb.streaming's rate ours should be, by workload, by row and in clumps.
TIMES_LANCEDB = {"a": (10.0, 50.0), "b": (4.0, 10.0), "c": (1.0, 1.0), "d": (1.0, 1.0)}
OF_BARE = 0.9  # of the bare reader's rate, one core each
Runs = dict[str, list[dict[str, float]]]

# ------------------------------------------------------------------ one measurement, in a process of its own


def measure(contender: str, directory: str, name: str, workload: str, clump: int | None) -> dict[str, float]:
    """Reads one epoch; returns seconds, rows and bytes."""
    import torch  # noqa: F401  (a trainer has it loaded)

    transform = decode if workload == "d" else None
    began: list[float] = []
    resting_s, shared = 0.0, _shared_bytes()
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
                pin(process, 0 if process.name().startswith("ray::Prefetch") else 1)
        began.append(time.perf_counter())

    for kind, module in MODULES.items():
        if contender.startswith(kind):
            importlib.import_module(module)
    if ray_runs:
        import ray

        # Ray's workers import the transform.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        wait_for_rest()
    start = time.perf_counter()
    batches = batches_of(contender, directory, name, clump, transform, ready)
    peak = _Peak(shared)
    rows, first = 0, 0.0
    for count, _ in batches:
        first = first or time.perf_counter()
        rows += count
    done = time.perf_counter()
    if rows <= int(name[1:]) - readers.SPLITS:  # fewer may be left out, which fill no cycle
        raise AssertionError(f"{contender} has delivered {rows} rows of {name}")
    since = began[0] if began else start
    return {
        "rows": rows,
        "seconds": done - since,
        "with_start": done - start - resting_s,
        "first_batch": first - since,
        "peak_bytes": peak.stop(),
    }


def batches_of(
    contender: str,
    directory: str,
    name: str,
    clump: int | None,
    transform: readers.Transform,
    ready: Callable[[], None],
) -> Iterator[Any]:
    """Starts a reader."""
    if contender.startswith("bare"):
        if contender not in PINNED:
            return readers.bare(directory, name, clump, transform)
        pin(psutil.Process(), 0)
        for _ in readers.bare(directory, name, clump, transform):
            pass
        ready()
        return readers.bare(directory, name, clump, transform, first_bytes=readers.FIRST_BLOCK_BYTES)
    if contender.startswith("ours"):
        args: dict[str, Any] = {"uri": directory, "table": name, "shuffle_clump_size": clump, "transform": transform}
        if contender in PINNED:
            from ray_lance_stream import PrefetchConfig

            args["prefetch"] = PrefetchConfig(num_actors=1)
        return readers.ours(args, ready, warm_up=contender in (SECOND, *PINNED))
    if contender in RAY_DATA:
        return readers.ray_data(directory, name, transform, shuffled=contender.endswith("shuffled"))
    kind, *settings = contender.split()
    workers = int(settings[0].removesuffix("w"))
    if kind == "lancedb.streaming":
        return readers.lancedb_streaming(directory, name, clump, transform, workers, int(settings[1]))
    if kind == "litdata":
        return readers.litdata(directory, name, workers)
    return readers.mosaicml(directory, name, clump, workers)


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


def _shared_bytes() -> int:
    return shutil.disk_usage("/dev/shm").used


class _Peak:
    """Samples the memory of this process, of those it has started, and what is in shared memory beyond ``shared``."""

    def __init__(self, shared: int) -> None:
        self._most, self._shared = 0, shared
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.2):
            total = max(0, _shared_bytes() - self._shared)
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


def command_of(args: argparse.Namespace, contender: str, *what: str) -> list[str]:
    """Returns the command that does something for a contender in a process of its own."""
    python = args.peer_python if contender in PEERS else sys.executable
    return [python, __file__, "--directory", args.directory, "--scale", str(args.scale), *what]


def run_one(args: argparse.Namespace, contender: str, workload: str, order: str) -> dict[str, float] | None:
    """Measures in a new process; None, with the reason on stderr, if it fails."""
    command = command_of(args, contender, "--one", contender, workload, order)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            printed, errors = process.communicate(timeout=args.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a reader's workers, too, which would go on by themselves
            print(f"{contender}, {workload}, {order}: not done after {args.timeout_s} s", file=sys.stderr)
            return None
    if process.returncode:
        print(f"{contender}, {workload}, {order}: failed\n{errors[-2000:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    return found


def compare(args: argparse.Namespace, workload: str, order: str) -> tuple[Runs, list[str]]:
    """Lets the contenders take turns; returns what was measured, and who failed in the round before."""
    contenders = [name for name in args.contenders if name not in PEERS or args.peer_python]
    contenders = [name for name in contenders if order == "row" or name not in RAY_DATA]  # which knows no clumps
    for name in contenders:
        if name in PEERS:
            subprocess.run(command_of(args, name, "--shards", name, workload), check=True)
    trial = {name: run_one(args, name, workload, order) for name in contenders}
    seconds = {name: result["seconds"] for name, result in trial.items() if result is not None}
    for kind, count in GO_ON.items():
        of_it = sorted((name for name in seconds if name.startswith(kind)), key=lambda name: seconds[name])
        for place, name in enumerate(of_it):
            if place >= count or seconds[name] > NEARLY_AS_FAST * seconds[of_it[0]]:
                del seconds[name]
    found: Runs = {name: [] for name in seconds}
    for _ in range(args.repeats):
        for contender, runs in found.items():
            result = run_one(args, contender, workload, order)
            if result is None:
                raise SystemExit(f"{contender} failed in a round that counts")
            runs.append(result)
    return found, [name for name, result in trial.items() if result is None]


def rates(runs: list[dict[str, float]], since: str = "seconds") -> list[float]:
    """Rows a second of each run, over what it calls ``seconds`` or ``with_start``."""
    return [run["rows"] / run[since] for run in runs]


def tell(workload: str, order: str, found: Runs, failed: list[str]) -> None:
    """Prints a table: rates in rows/s, and more."""
    print(f"\n({workload}) shuffled by {order}")
    print(f"  {'':28} {'rows/s':>32} {'with start':>11} {'first batch, s':>15} {'peak, MiB':>10}")
    for name, runs in found.items():
        rate = rates(runs)
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        spread = f"{statistics.median(rate):,.0f} ({min(rate):,.0f} to {max(rate):,.0f})"
        print(
            f"  {name:28} {spread:>32} {middle['rows'] / middle['with_start']:>11,.0f} "
            f"{middle['first_batch']:>15.3f} {middle['peak_bytes'] / 2**20:>10,.0f}",
            flush=True,
        )
    for name in failed:
        print(f"  {name:28} {'failed, or took too long':>32}", flush=True)


def ratios(workload: str, order: str, found: Runs) -> Iterator[Line]:
    """How ours compares, round by round."""
    title = f"({workload}) by {order}: rate, ours to "

    def to(ours: str, other: str, since: str = "seconds") -> list[float]:
        pairs = zip(rates(found[ours], since), rates(found[other], since), strict=True)
        return [mine / theirs for mine, theirs in pairs]

    if "ours" in found:
        theirs = [name for name in found if name in LANCEDB]
        if theirs:
            best = max(theirs, key=lambda name: statistics.median(rates(found[name])))
            target = TIMES_LANCEDB[workload][order != "row"]
            yield Line(what=title + best, unit="", values=to("ours", best), at_least=target)
            yield Line(what=f"{title}{best}, with start", unit="", values=to("ours", best, "with_start"))
            if "bare" in found:  # so much there is to gain with one reader
                what = f"({workload}) by {order}: rate, a bare reader to {best}"
                yield Line(what=what, unit="", values=to("bare", best))
            memory = [a["peak_bytes"] / b["peak_bytes"] for a, b in zip(found["ours"], found[best], strict=True)]
            yield Line(what=f"({workload}) by {order}: peak memory, ours to {best}", unit="", values=memory)
        for name in found:
            if name in PEERS or name in RAY_DATA:
                same = order == "row" and name != "ray data" and not name.startswith("litdata")  # as well shuffled
                yield Line(what=title + name, unit="", values=to("ours", name), at_least=1.0 if same else None)
                yield Line(what=f"{title}{name}, with start", unit="", values=to("ours", name, "with_start"))
            elif name == "bare":
                yield Line(what=title + "a bare reader", unit="", values=to("ours", name))
                if SECOND in found:
                    yield Line(what=f"{title}a bare reader, 2nd epoch", unit="", values=to(SECOND, name))
    if all(name in found for name in PINNED):
        target_of_bare = OF_BARE if workload in ("a", "b") else None
        what = title + "a bare reader, one core each"
        yield Line(what=what, unit="", values=to(PINNED[1], PINNED[0]), at_least=target_of_bare)


def draw(results: dict[str, Runs], path: Path) -> None:
    """Draws the medians, with the least and the most, one panel for each workload and order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1 + len(found) for found in results.values()]
    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(8, 0.3 * sum(heights) + len(results)), squeeze=False, height_ratios=heights
    )
    for panel, (title, found) in zip(panels[:, 0], results.items(), strict=True):
        rate = {name: rates(runs) for name, runs in found.items()}
        middle = {name: statistics.median(several) for name, several in rate.items()}
        spread = [[middle[n] - min(rate[n]) for n in rate], [max(rate[n]) - middle[n] for n in rate]]
        colors = ["C1" if name.startswith("ours") else "C0" for name in rate]
        panel.barh(list(rate), list(middle.values()), xerr=spread, color=colors)
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
    parser.add_argument("--orders", nargs="+", choices=sorted(ORDERS), default=list(ORDERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows, to try it out")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has mosaicml-streaming and litdata")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "WORKLOAD", "ORDER"), help=argparse.SUPPRESS)
    parser.add_argument("--shards", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    if args.one:
        contender, workload, order = args.one
        name = ensure_table(args.directory, workload, int(ROWS[workload] * args.scale))
        print(json.dumps(measure(contender, args.directory, name, workload, ORDERS[order])))
        return
    if args.shards:
        contender, workload = args.shards
        kind = "mds" if contender.startswith("mosaicml") else "lit"
        ensure_shards(args.directory, f"{workload}{int(ROWS[workload] * args.scale)}", kind)
        return
    for workload in args.workloads:
        ensure_table(args.directory, workload, int(ROWS[workload] * args.scale))
    print(machine())
    results: dict[str, Runs] = {}
    failures: dict[str, list[str]] = {}
    lines: list[Line] = []
    for workload in args.workloads:
        for order in args.orders:
            title = f"({workload}) by {order}"
            found, failed = results[title], failures[title] = compare(args, workload, order)
            tell(workload, order, found, failed)
            lines += ratios(workload, order, found)
    show(lines)
    save(lines, Path(args.directory, "epoch_rate.json"), {"runs": results, "failed": failures})
    draw(results, Path(args.directory, "epoch_rate.png"))


if __name__ == "__main__":
    main()
