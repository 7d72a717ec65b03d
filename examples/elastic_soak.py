"""Train for a while on nodes that come and go, kill everything that can be killed, and prove that no row was missed.

Starts several Ray nodes on this machine: a head, nodes for prefetchers, nodes for training workers. While
``TorchTrainer`` trains on one to three workers, training workers, prefetchers, the coordinator and the state manager
are killed, and nodes are lost, preempted with a notice, and added, in an order that ``--seed`` says. Every id that a
worker is handed is logged. At the end the log is compared with one uninterrupted reader: every row once per epoch, in
order. In the last two fifths of the time only training workers and their nodes are harmed; memory, open files, actors
and objects of what lives on then must not have grown. Linux.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import shutil
import sys
import time
import warnings
from dataclasses import asdict, dataclass
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
from soak.cluster import OURS, Nodes, Pool
from soak.faults import Event, Faults
from soak.picture import draw
from soak.proof import Steps, prove
from soak.sampling import Sample, Sampler, Store, judge
from soak.steplog import Following, Worker, read_log
from soak.timeline import events_text, growth_text, restarts, samples_text, summary_text
from soak.training import Training

from ray_lance_stream import LanceStream, PrefetchConfig

NUM_SPLITS: Final = 12
BATCH: Final = 48
WIDTH: Final = 512  # floats of a row: a step is 100 kB
ROWS: Final = NUM_SPLITS * 401  # all in an epoch of 100 steps, and a last one of 12 rows
KIB: Final = 1024
START_WITHIN_S: Final = 300.0
END_WITHIN_S: Final = 120.0
GONE_WITHIN_S: Final = 10.0
MOST_PROBLEMS: Final = 20  # shown
SPARED_FROM: Final = 0.6  # of the time that faults are made for: then nothing but trainers is harmed


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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of a run.

    Attributes:
        began_s: When it was handed its first step, seconds since 1970.
        spared_s: From when on only training workers and their nodes were harmed, likewise.
        events: What was done to it.
        samples: Its processes, over time.
        stores: Its object stores, over time.
        failures: What went wrong beside the faults.
    """

    began_s: float
    spared_s: float
    events: list[Event]
    samples: list[Sample]
    stores: list[Store]
    failures: list[str]


def train_under_faults(stream: LanceStream, nodes: Nodes, output: Path, minutes: float, seed: int) -> Seen:
    """Trains and does harm."""
    pools: list[Pool] = ["data", "data", "train", "train"]
    for pool in pools:
        nodes.add(pool)
    training, sampler = Training(stream, output, WIDTH), Sampler(nodes)
    following = Following(training.log)
    faults = Faults(nodes, following, random.Random(seed), say)
    failures = []
    sampler.start()
    training.start()
    began_s = time.time()
    spared_s = math.inf
    try:
        say("waiting for the first step")
        while following.newest()[1] == 0 and training.is_running():
            if time.time() - began_s > START_WITHIN_S:
                raise TimeoutError(f"no step was trained within {START_WITHIN_S:.0f} s")
            time.sleep(0.2)
        began_s = time.time()
        say(f"training; faults for {minutes:g} minutes, or until Ctrl-C")
        spared_s = began_s + SPARED_FROM * 60 * minutes
        faults.go_on(began_s + 60 * minutes, spared_s, training.is_running)
        faults.give_back()
    except KeyboardInterrupt:
        say("interrupted: ending the run, and proving what there is")
    except Exception as error:  # what was delivered until then is worth a proof all the same
        failures.append(f"the faults broke off: {type(error).__name__}: {error}")
    if not training.stop(END_WITHIN_S):
        failures.append(f"fit() did not end within {END_WITHIN_S:.0f} s")
    if training.error is not None:
        failures.append(f"fit() raised {type(training.error).__name__}: {training.error}")
    sampler.stop()
    stream.close()
    failures += [f"an actor of ours is left: {process}" for process in processes_left(nodes)]
    return Seen(
        began_s=began_s,
        spared_s=spared_s,
        events=faults.events,
        samples=sampler.samples,
        stores=sampler.stores,
        failures=failures,
    )


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
    return report(output, stream, seen)


def report(output: Path, stream: LanceStream, seen: Seen) -> int:
    """Proves, prints and draws; returns the exit code."""
    say("comparing with one uninterrupted reader")
    groups, events = read_log(output / "log"), seen.events
    last_epoch = max((share.at[0] for group in groups for w in group for share in w.shares), default=0)
    reference = read_reference(stream, last_epoch + 1)
    per_epoch = sum(epoch == 0 for epoch, _ in reference)
    proof = prove(groups, reference, NUM_SPLITS, ROWS)
    found, grown = restarts(groups, events, proof), judge(seen.samples, seen.stores, seen.spared_s)

    bad = proof.problems + seen.failures + [f"a training loop was ended by {text}" for text in errors_of_ours(groups)]
    bad += [f"{g.what}: grows by {g.per_minute:.2f} a minute, at most {g.bound:g} is taken" for g in grown if g.is_bad]
    text = "\n".join(
        [
            events_text(events, found, seen.began_s),
            "",
            samples_text(groups, seen.samples, seen.stores, per_epoch, seen.began_s),
            "",
            growth_text(grown),
            "",
            summary_text(groups, events, found, proof),
            f"verdict              {'FAILED' if bad else 'passed'}",
            *(f"  {problem}" for problem in bad[:MOST_PROBLEMS]),
        ]
    )
    print(text)
    (output / "timeline.txt").write_text(text + "\n")
    for name, entries in (("events", events), ("samples", seen.samples), ("stores", seen.stores)):
        lines = [json.dumps(asdict(entry)) for entry in entries]
        (output / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    draw(output / "timeline.png", groups, events, seen.samples, seen.stores, per_epoch, seen.began_s)
    print(f"picture              {output / 'timeline.png'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
