"""Ray for the tests: one node, or several on one machine that tests may add and lose."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from runs import is_running, wait_until

# Ray takes a node for lost after half a minute, and Train waits for its workers for a minute. Read by the
# processes of the cluster and by Train's controller when they start. A node that is gone refuses to be asked, at
# once; one that is only slow, on a machine that does too much, has its time.
_IMPATIENCE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}


@pytest.fixture(scope="module")
def one_node(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray on this machine, with the module's ``NUM_CPUS``, 2 without."""
    ray.init(
        address="local",
        num_cpus=getattr(request.module, "NUM_CPUS", 2),
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Nodes:
    """A head without CPUs, where the driver is, and the nodes that a test adds to it."""

    def __init__(self) -> None:
        ray.shutdown()  # the one node of earlier tests of the module
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add_loader(self) -> Any:
        """Adds a node for prefetchers, with one CPU."""
        return self._cluster.add_node(num_cpus=1, labels={"pool": "data"})

    def add_trainer(self) -> Any:
        """Adds a node for one training worker, which asks for a GPU (there is none, nobody uses it)."""
        return self._cluster.add_node(num_cpus=1, num_gpus=1, labels={"pool": "train"})

    def add_plain(self) -> Any:
        """Adds a node with one CPU and no label."""
        return self._cluster.add_node(num_cpus=1)

    @staticmethod
    def of_actors(session_id: str) -> dict[str, str]:
        """Returns the ids of the nodes that a session's named actors live on, by the last part of their names."""
        state: Any = ray._private.state
        return {
            actor["Name"].rsplit(".", 1)[1]: actor["Address"]["NodeID"]
            for actor in state.actors().values()
            if actor["Name"].startswith(session_id) and actor["State"] == "ALIVE"
        }

    def preempt(self, node_id: str, notice_s: float) -> None:
        """Announces the end of a node, as the owner of spot machines does. It runs on until :meth:`lose`."""
        raylet: Any = ray._raylet
        gcs = raylet.GcsClient(address=self._cluster.address)
        reason: Any = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = gcs.drain_node(node_id, reason, "a test's notice", int((time.time() + notice_s) * 1000))
        assert accepted, why

    def node(self, node_id: str) -> Any:
        """Returns a node that a test has added, by Ray's id."""
        (found,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        return found

    def lose(self, node: Any) -> None:
        """Ends a node without warning, as a machine goes: the raylet and every process on it, by SIGKILL."""
        processes = _end(node)
        self._cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: not any(map(is_running, processes)), 10, "the processes of the node are gone")
        wait_until(lambda: self._is_dead(node.node_id), 60, "Ray knows that the node is lost")

    def close(self) -> None:
        """Ends the cluster."""
        ray.shutdown()
        for node in self._cluster.worker_nodes:
            _end(node)
        self._cluster.shutdown()  # type: ignore[no-untyped-call]

    @staticmethod
    def _is_dead(node_id: str) -> bool:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return all(not node["Alive"] for node in nodes if node["NodeID"] == node_id)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A cluster of several nodes, new for each test: what Train believes of its nodes is up to 20 seconds old."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in _IMPATIENCE.items():
            environment.setenv(name, value)
        cluster = Nodes()
        # Train asks the cluster at this address for its actors; without it, whichever was started last.
        environment.setenv("RAY_ADDRESS", cluster._cluster.address)
        try:
            yield cluster
        finally:
            cluster.close()


def _end(node: Any) -> list[int]:
    """Kills a node's raylet and all that it has started; returns those."""
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    processes = _descendants(raylet)
    for pid in (raylet, *processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return processes


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found
