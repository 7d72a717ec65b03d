"""Training nodes whose end is announced: a checkpoint just in time, and no step is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import Tables
from loops import until_preempted
from nodes import Nodes
from runs import delivered, fit, read_log, reference, wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault, pytest.mark.timeout(600)]
NOTICE_S = 20.0


@pytest.mark.parametrize("relaxed", [False, True], ids=["all report", "those who go do not"])
def test_no_step_is_lost_when_a_node_is_preempted(
    nodes: Nodes, tables: Tables, tmp_path: Path, rng: Random, relaxed: bool
) -> None:
    nodes.add_loader()
    for _ in range(2):
        nodes.add_trainer()
    stream = tables.stream(403, num_splits=8, global_batch_size=16, prefetch=PrefetchConfig(placement_timeout_s=120))
    failed: list[BaseException] = []
    notice_after = rng.randrange(2, 20)

    def entries(what: str, world: int) -> list[dict[str, Any]]:
        assert not failed, failed
        return [entry for entry in read_log(tmp_path) if what in entry and entry.get("world", world) == world]

    def run() -> None:
        try:
            fit(
                until_preempted,
                {"train": stream},
                (1, 2),
                tmp_path,
                scaling={"use_gpu": True, "resources_per_worker": {"GPU": 1}},
                failure={"relax_collectives_on_preemption": relaxed, "preemption_grace_s": NOTICE_S * relaxed},
                relaxed=relaxed,
                step_s=0.2,
            )
        except BaseException as error:
            failed.append(error)

    training = threading.Thread(target=run)
    training.start()
    try:
        wait_until(lambda: len(entries("at", 2)) > 2 * notice_after, 180, "steps of two workers")
        (going,) = [entry["node"] for entry in entries("start", 2) if entry["rank"] == 1]
        deadline = time.monotonic() + NOTICE_S
        nodes.preempt(str(going), NOTICE_S)
        wait_until(lambda: len(entries("saved", 2)) == (1 if relaxed else 2), 60, "a checkpoint")
        time.sleep(max(0.0, deadline - time.monotonic()))  # the owner of the machine takes it when he said
        nodes.lose(nodes.node(str(going)))
        wait_until(lambda: len(entries("at", 1)) > 10, 180, "steps of one worker")
    finally:
        (tmp_path / "log").mkdir(exist_ok=True)
        (tmp_path / "log" / "enough").touch()
        training.join(120)
    stream.close()
    assert not failed and not training.is_alive()
    log = read_log(tmp_path)
    (saved,) = {tuple(entry["saved"]) for entry in log if "saved" in entry}
    (resumed,) = [entry["start"] for entry in log if "start" in entry and entry["world"] == 1]
    assert tuple(resumed) == saved
    steps = [tuple(entry["at"]) for entry in log if "at" in entry and entry["rank"] == 0]
    assert len(steps) == len(set(steps)), "no step was run again"
    batches = delivered(log)
    expected = list(reference(stream, 1 + max(epoch for epoch, _ in batches)).items())
    assert list(batches.items()) == expected[: len(batches)]
