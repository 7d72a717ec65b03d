"""Train for a while on nodes that come and go, kill everything that can be killed, and prove that no row was missed.

Starts several Ray nodes on this machine: a head, nodes for prefetchers, nodes for training workers. While
``TorchTrainer`` trains on one to three workers, training workers, prefetchers, the coordinator and the state manager are
killed, and nodes are lost, preempted with a notice, and added, in an order that ``--seed`` says. Every id that a
worker is handed is logged. At the end the log is compared with one uninterrupted reader: every row once per epoch, in
order. Memory, open files, actors and objects of what lives long must not have grown. Linux; about 6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

# Ray takes a node for lost after half a minute, and Train waits as long for what will not come. Read by Ray's processes
# and by Train's controller when they start.
for name, value in {
    "RAY_AUTH_MODE": "disabled",  # nodes of one user on one machine
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}.items():
    os.environ.setdefault(name, value)
# Lance warns of forks. Ray forks only to execute another program at once, which is safe.
warnings.filterwarnings("ignore", message=".*fork")

import lancedb
import numpy as np
import pyarrow as pa
import ray
from soak.cluster import OURS, Nodes
from soak.faults import Faults
from soak.picture import draw
from soak.proof import Proof, Steps, prove
from soak.sampling import Sampler, judge
from soak.steplog import Following, Worker, read_log
from soak.timeline import events_text, growth_text, restarts, samples_text
from soak.training import Training

from ray_lance_stream import LanceStream, PrefetchConfig

NUM_SPLITS: Final = 12
BATCH: Final = 48
WIDTH: Final = 512  # floats of a row: a step is 100 kB
ROWS: Final = NUM_SPLITS * 401  # all in an epoch of 100 steps, and a last one of 12 rows
KIB: Final = 1024
START_WITHIN_S: Final = 180.0
END_WITHIN_S: Final = 120.0
GONE_WITHIN_S: Final = 10.0


def say(line: str) -> None:
    """Prints a line of what goes on."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def write_table(uri: str) -> None:
    """Writes id, x (WIDTH values) and y, the mean of x."""
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), WIDTH)
    rows = pa.table({"id": np.arange(ROWS), "x": column, "y": x.mean(axis=1)})
    lancedb.connect(uri).create_table("rows", rows)


def open_stream(uri: str) -> LanceStream:
    """The stream that is trained on: blocks of two or three steps, of which a few are always under way."""
    prefetch = PrefetchConfig(
        num_actors=2,
        block_bytes=256 * KIB,
        max_buffer_bytes=2048 * KIB,
        placement_timeout_s=120,
        retry_window_s=120,  # a node that starts on a machine with few cores takes its time
    )
    options: dict[str, Any] = {"num_splits": NUM_SPLITS, "global_batch_size": BATCH, "shuffle_seed": 11}
    return LanceStream(uri, "rows", prefetch=prefetch, **options)


def read_reference(stream: LanceStream, epochs: int) -> Steps:
    """What one reader in this process gets, without interruption."""
    steps: Steps = {}
    with stream.open() as shard:
        for epoch in range(epochs):
            for batch in shard.iter_batches():
                steps[epoch, shard.step] = batch["id"].tolist()
    return steps


def train_under_faults(stream: LanceStream, nodes: Nodes, output: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Trains and does harm; returns what was seen."""
    for pool in ("data", "data", "train", "train"):
        nodes.add(pool)  # type: ignore[arg-type]
    training, sampler = Training(stream, output, WIDTH), Sampler(nodes)
    following = Following(training.log)
    faults = Faults(nodes, following, random.Random(seed), say)
    sampler.start()
    training.start()
    began_s = time.time()
    try:
        say("waiting for the first step")
        while following.newest()[1] == 0 and training.is_running():
            if time.time() - began_s > START_WITHIN_S:
                raise RuntimeError(f"no step was trained within {START_WITHIN_S:.0f} s")
            time.sleep(0.2)
        began_s = time.time()
        say(f"training; faults for {minutes:g} minutes, or until Ctrl-C")
        faults.go_on(began_s + 60 * minutes, training.is_running)
    except KeyboardInterrupt:
        say("interrupted: ending the run, and proving what there is")
    ended = training.stop(END_WITHIN_S)
    sampler.stop()
    stream.close()
    return {
        "faults": faults,
        "sampler": sampler,
        "began_s": began_s,
        "error": training.error if ended else TimeoutError(f"fit() did not end within {END_WITHIN_S:.0f} s"),
        "left": processes_left(nodes),
    }


def processes_left(nodes: Nodes) -> list[str]:
    """Returns which of our actors are still there a while after the end."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        left = [f"{found.role} {found.process.pid}" for found in nodes.processes() if found.role in OURS]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def errors_of_ours(groups: list[list[Worker]]) -> list[str]:
    """Returns the exceptions of this package that ended training loops: no fault here is meant to cause one."""
    errors = [worker.error for group in groups for worker in group if worker.error]
    return [f"{name}: {text}" for module, name, text in errors if module.startswith("ray_lance_stream")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="from the first step on")
    parser.add_argument("--seed", type=int, default=0, help="says what happens, and after how many steps")
    parser.add_argument("--output", type=Path, default=Path("output/soak"))
    args = parser.parse_args()
    output = args.output.resolve()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    uri = str(output / "db")

    say("starting a head and four nodes")
    nodes = Nodes()
    # Train asks the cluster at this address for its actors; without it, whichever was started last.
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        # Before any table is opened: starting Ray forks, and Lance has threads from then on.
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        write_table(uri)
        stream = open_stream(uri)
        seen = train_under_faults(stream, nodes, output, args.minutes, args.seed)
    finally:
        ray.shutdown()
        nodes.close()
    return report(output, stream, **seen)


def report(
    output: Path, stream: LanceStream, faults: Faults, sampler: Sampler, began_s: float, error: Any, left: list[str]
) -> int:
    """Proves, prints and draws; returns the exit code."""
    say("comparing with one uninterrupted reader")
    groups, events = read_log(output / "log"), faults.events
    last_epoch = max((share.at[0] for group in groups for w in group for share in w.shares), default=0)
    reference = read_reference(stream, last_epoch + 1)
    per_epoch = sum(epoch == 0 for epoch, _ in reference)
    proof: Proof = prove(groups, reference, NUM_SPLITS, ROWS)
    found, grown = restarts(groups, events, proof), judge(sampler.samples, sampler.stores)

    bad = list(proof.problems)
    bad += [f"an actor of ours is left: {process}" for process in left]
    bad += [f"the run failed: {type(error).__name__}: {error}"] if error is not None else []
    bad += [f"a training loop was ended by {text}" for text in errors_of_ours(groups)]
    bad += [f"{g.what} grows by {g.per_minute:.2f} a minute, at most {g.bound:g} is taken" for g in grown if g.is_bad]
    count = sum(event.is_fault for event in events)
    of_faults = [r for r in found if r.cause is not None and r.cause.is_fault]
    saves = {at for group in groups for w in group for at, why in w.saved if why == "preempted"}
    costs = sorted(restart.cost_s for restart in found)
    text = "\n".join(
        [
            events_text(events, found, began_s),
            "",
            samples_text(groups, sampler.samples, sampler.stores, per_epoch, began_s),
            "",
            growth_text(grown),
            "",
            f"faults               {count}, of which {len(of_faults)} restarted the training workers",
            f"nodes added          {len(events) - count}",
            f"restarts             {len(found)}, in {sum(r.pause_s for r in found):.0f} s without a step"
            + (f"; {costs[len(costs) // 2]:.1f} s from cause to first step (median)" if costs else ""),
            f"world sizes          {' -> '.join(str(g[0].world) for g in groups)}",
            f"steps                {proof.steps} in {proof.epochs} whole epochs and a part; {proof.replayed} run again, "
            f"the same; {proof.partial} delivered in part",
            f"saved just in time   {len(saves)} checkpoints before a preempted node was taken",
            f"rows                 {proof.rows}, {'NOT AS ONE READER GETS THEM' if proof.problems else 'each once per epoch, in the order of one uninterrupted reader'}",
            f"verdict              {'FAILED' if bad else 'passed'}",
            *(f"  {problem}" for problem in bad[:20]),
        ]
    )
    print(text)
    (output / "timeline.txt").write_text(text + "\n")
    (output / "events.jsonl").write_text("".join(json.dumps(asdict(event)) + "\n" for event in events))
    sampler.write(output / "samples.jsonl")
    draw(output / "timeline.png", groups, events, sampler.samples, sampler.stores, per_epoch, began_s)
    print(f"picture              {output / 'timeline.png'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
