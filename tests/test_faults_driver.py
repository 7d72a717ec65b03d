"""Drivers that are killed in the middle of ``fit()``, and the runs that follow on the same cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import drivers
import psutil
import pytest
import ray
from conftest import Tables
from nodes import Nodes
from runs import delivered, is_running, read_log, reference, wait_until

from ray_lance_stream.checkpoint import locate, read_streams
from ray_lance_stream.cluster.session import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.fault]
IDLE_TIMEOUT_S = 5.0
STEPS = 25  # of 8 rows, in an epoch
PROCESSES_S = 60  # Ray notices that a driver is gone, and ends its processes


def our_actors() -> dict[str, list[int]]:
    """The process ids of the actors of all streams on the cluster, by the coordinator's name."""
    found: dict[str, list[int]] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].endswith(".coordinator"):
            coordinator: Any = ray.get_actor(entry["name"], namespace=NAMESPACE)
            manager: Any = ray.get_actor(entry["name"].replace(".coordinator", ".manager"), namespace=NAMESPACE)
            prefetchers = [pid for _, pid in ray.get(coordinator.prefetchers.remote())]
            found[entry["name"]] = [ray.get(coordinator.pid.remote()), ray.get(manager.pid.remote()), *prefetchers]
    return found


def starts(storage: Path, name: str) -> list[list[int]]:
    return [entry["start"] for entry in read_log(storage, name) if "start" in entry]


def driver_options(nodes: Nodes, tables: Tables, storage: Path) -> dict[str, Any]:
    """Adds nodes for two training workers and a prefetcher; returns what drivers of runs on them are told."""
    nodes.add_loader()
    nodes.add_trainer()
    nodes.add_trainer()
    return {
        "address": os.environ["RAY_ADDRESS"],
        "uri": tables.uri(8 * STEPS),
        "storage": str(storage),
        "idle_timeout_s": IDLE_TIMEOUT_S,
    }


def controllers() -> list[int]:
    """The process ids of the Ray Train controllers on this cluster."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("ray::TrainCont"):
                raylet = process.parent()
                if raylet is not None and any(os.environ["RAY_ADDRESS"] in part for part in raylet.cmdline()):
                    found.append(process.pid)
    return found


def steps(storage: Path, name: str) -> int:
    return sum(1 for entry in read_log(storage, name) if "at" in entry)


@pytest.mark.timeout(900)
def test_a_killed_controller_ends_the_run_and_the_same_run_goes_on(
    nodes: Nodes, tables: Tables, tmp_path: Path
) -> None:
    options = driver_options(nodes, tables, tmp_path)
    running = []
    try:
        first = drivers.start(**options, name="run")
        running.append(first)
        wait_until(lambda: steps(tmp_path, "run") > 20, 180, "steps of the first driver")
        snapshot = tmp_path / "runs" / "run" / "checkpoint_manager_snapshot.json"
        wait_until(snapshot.exists, 60, "a checkpoint")
        workers = {entry["pid"] for entry in read_log(tmp_path, "run")}
        (controller,) = controllers()
        os.kill(controller, signal.SIGKILL)
        assert first.wait(120) not in (0, -signal.SIGKILL)  # fit() says that the controller died
        wait_until(lambda: not any(map(is_running, workers)), PROCESSES_S, "the workers ended with their controller")

        before = steps(tmp_path, "run")
        second = drivers.start(**options, name="run")
        running.append(second)
        wait_until(lambda: steps(tmp_path, "run") > before + 20, 180, "steps of the second driver")
        epoch = max(entry["at"][0] for entry in read_log(tmp_path, "run") if "at" in entry)
        (tmp_path / "log" / "last").write_text(str(epoch + 1))
        assert second.wait(300) == 0
        resumed = starts(tmp_path, "run")[2:]
        assert len(resumed) == 2 and resumed[0] == resumed[1] != [0, 0] and resumed[0][1] % 4 == 0
        assert delivered(read_log(tmp_path, "run")) == reference(tables.stream(8 * STEPS), epoch + 2)
        wait_until(lambda: not our_actors(), IDLE_TIMEOUT_S + PROCESSES_S, "nothing of any run is left")
    finally:
        for driver in running:
            driver.kill()
            driver.wait()


@pytest.mark.timeout(900)
def test_a_killed_driver_is_followed_by_others(nodes: Nodes, tables: Tables, tmp_path: Path) -> None:
    options = driver_options(nodes, tables, tmp_path)
    runs = tmp_path / "runs"
    running = []
    try:
        first = drivers.start(**options, name="run")
        running.append(first)
        wait_until(lambda: steps(tmp_path, "run") > 20, 180, "steps of the first driver")
        snapshot = runs / "run" / "checkpoint_manager_snapshot.json"
        wait_until(snapshot.exists, 60, "a checkpoint of the first driver")
        left = [pid for pids in our_actors().values() for pid in pids]
        left += {entry["pid"] for entry in read_log(tmp_path, "run")}
        first.kill()
        first.wait()
        assert first.returncode == -signal.SIGKILL and len(left) == 5

        # At once, while Ray may still be ending what the first one left.
        before = steps(tmp_path, "run")
        second = drivers.start(**options, name="run")
        running.append(second)
        wait_until(lambda: not any(map(is_running, left)), IDLE_TIMEOUT_S + PROCESSES_S, "the first run's actors ended")
        wait_until(lambda: steps(tmp_path, "run") > before + 20, 180, "steps of the second driver")
        assert len(our_actors()) == 1
        epoch = max(entry["at"][0] for entry in read_log(tmp_path, "run") if "at" in entry)
        (tmp_path / "log" / "last").write_text(str(epoch + 1))
        assert second.wait(300) == 0
        resumed = starts(tmp_path, "run")[2:]
        assert len(resumed) == 2 and resumed[0] == resumed[1] != [0, 0] and resumed[0][1] % 4 == 0
        batches = delivered(read_log(tmp_path, "run"))
        stream = tables.stream(8 * STEPS)
        assert batches == reference(stream, epoch + 2)

        results = json.loads(snapshot.read_text())
        checkpoint = runs / "run" / results["latest_checkpoint_result"]["checkpoint_dir_name"]
        states = read_streams(*locate(checkpoint))
        assert states is not None
        at = states["train"].epoch, states["train"].completed_cycles // 2
        (tmp_path / "log" / "last").write_text(str(at[0] + 1))
        third = drivers.start(**options, name="another", resume_from=str(checkpoint))
        running.append(third)
        assert third.wait(300) == 0
        assert starts(tmp_path, "another") == [list(at)] * 2
        want = reference(stream, at[0] + 2)
        assert delivered(read_log(tmp_path, "another")) == {place: ids for place, ids in want.items() if place > at}
        wait_until(lambda: not our_actors(), IDLE_TIMEOUT_S + PROCESSES_S, "nothing of any run is left")
    finally:
        for driver in running:
            driver.kill()
            driver.wait()
