"""What a stream adds to a restart of the training workers, beside Ray Train without one.

    python tests/benchmarks/restart.py [--directory DIR] [--repeats 5]

Two workers, one of which is killed in its second epoch; Ray Train starts the group again. Taken is the time from the
kill to the end of the first step of the new group, of the same loop with a stream and with batches of zeros, by turns
on one cluster, after one of each that does not count; a step is a mean over both workers. And how long the first batch
takes from when it is asked for: of the group that was started again, beside that of an epoch which begins without a
restart; and what comes before it in the new group, where ``shard.epoch`` finds the run's actors and the checkpoint's
state.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
TESTS = Path(__file__).resolve().parents[1]
# Workers import this file by name.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

sys.path.append(str(TESTS))
from benchmarks.report import Line, save, show
from benchmarks.workloads import ensure_table

from ray_lance_stream import LanceStream, StreamDataConfig, report

ROWS, BATCH, SPLITS = 48_000, 480, 48
KILL_AT = (1, 20)
ADDS_S = 1.0
FIRST_BATCH_TIMES = 1.2  # of what one takes without a restart


def train_loop(config: dict[str, Any]) -> None:
    """Two epochs; the second rank dies once, in the second one."""
    rank, died = ray.train.get_context().get_world_rank(), Path(config["log"], "died")
    again = died.exists()
    shard = ray.train.get_dataset_shard("train") if config["stream"] else None
    steps = ROWS // BATCH if not again else 1 + ROWS // BATCH - KILL_AT[1]
    began = time.time()
    begin = int(again) if shard is None else shard.epoch
    joined_s = time.time() - began
    for epoch in range(begin, 2):
        asked = time.time()
        batches = iter(shard.iter_torch_batches()) if shard is not None else iter([torch.zeros(BATCH // 2, 64)] * steps)
        for number, batch in enumerate(batches):
            if number == 0:
                first_s = time.time() - asked
            mean = (batch["x"] if shard is not None else batch).mean().reshape(1)
            torch.distributed.all_reduce(mean)
            if number == 0 and rank == 0:
                took = {"joined_s": joined_s, "first_s": first_s}
                entry = {"epoch": epoch, "again": again, "at": time.time(), **took}
                with Path(config["log"], "steps").open("a") as log:
                    log.write(json.dumps(entry) + "\n")
            if (epoch, number + 1) == (KILL_AT[0], KILL_AT[1] - 1):
                _save(rank, shard is not None)
            if (epoch, number + 1) == KILL_AT and rank == 1 and not again:
                died.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        if again:
            return


def _save(rank: int, with_stream: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint.from_directory(directory) if rank == 0 else None
        (report if with_stream else ray.train.report)({}, checkpoint)


def restart(name: str, stream: LanceStream | None) -> tuple[float, float, float, float]:
    """Runs one loop; returns seconds of the restart, of joining, and of a first batch with and without one."""
    with tempfile.TemporaryDirectory() as place:
        TorchTrainer(
            train_loop,
            train_loop_config={"log": place, "stream": stream is not None},
            datasets={} if stream is None else {"train": stream},
            dataset_config=StreamDataConfig(),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=f"{place}/runs", failure_config=FailureConfig(max_failures=1)),
        ).fit()
        killed = float(Path(place, "died").read_text())
        entries = [json.loads(line) for line in Path(place, "steps").read_text().splitlines()]
    again = next(entry for entry in entries if entry["again"])
    usual = next(entry for entry in entries if entry["epoch"] == 1 and not entry["again"])
    return again["at"] - killed, again["joined_s"], again["first_s"], usual["first_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", default="output/benchmarks")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    name = ensure_table(args.directory, "a", ROWS)
    bare: list[float] = []
    ours: list[tuple[float, float, float, float]] = []
    for turn in range(args.repeats + 1):
        without = restart(f"bare-{turn}", None)
        with LanceStream(args.directory, name, num_splits=SPLITS, global_batch_size=BATCH) as stream:
            with_stream = restart(f"stream-{turn}", stream)
        if turn:
            bare.append(without[0])
            ours.append(with_stream)
    ray.shutdown()
    adds = [mine[0] - theirs for mine, theirs in zip(ours, bare, strict=True)]
    times = [again / usual for *_, again, usual in ours]
    lines = [
        Line(what="restart of the workers without a stream: kill to first step", unit="s", values=bare),
        Line(what="restart of the workers with a stream", unit="s", values=[run[0] for run in ours]),
        Line(what="what the stream adds to it", unit="s", values=adds, at_most=ADDS_S),
        Line(what="joining the run again", unit="ms", values=[1e3 * run[1] for run in ours]),
        Line(what="first batch after a restart", unit="ms", values=[1e3 * run[2] for run in ours]),
        Line(what="first batch of an epoch without a restart", unit="ms", values=[1e3 * run[3] for run in ours]),
        Line(what="the former to the latter", unit="", values=times, at_most=FIRST_BATCH_TIMES),
    ]
    show(lines)
    save(lines, Path(args.directory, "restart.json"))


if __name__ == "__main__":
    main()
