"""A Ray cluster of several nodes on this machine, and the processes on it, which may be killed by their ids."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

Pool = Literal["data", "train"]
_STORE_BYTES: Final = 128 * 1024 * 1024  # of each node
_GONE_WITHIN_S: Final = 10.0
_PORTS: Final = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")

# What Ray calls the processes of its actors: "ray::Class.method", or "ray::name:Class.method".
_TITLE: Final = re.compile(r"ray::(?:[^:]+:)?(\w+)")
ROLES: Final = {
    "TrainController": "controller",
    "Coordinator": "coordinator",
    "StateManager": "manager",
    "Prefetcher": "prefetcher",
    "RayTrainWorker": "worker",
}
OURS: Final = ("coordinator", "manager", "prefetcher")


@dataclass(frozen=True)
class Process:
    """A process of the run; its role is one of ``ROLES``."""

    role: str
    process: psutil.Process


class Nodes:
    """A head without CPUs, where driver, controller, coordinator and manager are, and nodes that come and go."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head | _common())
        self._pools: dict[Any, Pool] = {}

    @property
    def address(self) -> str:
        """Where ``ray.init`` finds the cluster."""
        return str(self._cluster.address)

    def of(self, pool: Pool) -> list[Any]:
        """Returns the nodes for prefetchers ("data"), or those for training workers ("train")."""
        return [node for node, other in list(self._pools.items()) if other == pool]

    def add(self, pool: Pool) -> Any:
        """Adds a node. A training worker asks for a GPU, which is there in name only, and used by nobody."""
        node = self._cluster.add_node(num_cpus=1, num_gpus=int(pool == "train"), labels={"pool": pool}, **_common())
        self._pools[node] = pool
        return node

    def announce_end(self, node: Any, notice_s: float) -> None:
        """Drains a node, as the owner of a spot machine does before he takes it. It runs on until :meth:`lose`."""
        raylet: Any = ray._raylet
        gcs = raylet.GcsClient(address=self.address)
        reason: Any = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + notice_s) * 1000)
        accepted, why = gcs.drain_node(node.node_id, reason, "the soak takes the machine", deadline_ms)
        if not accepted:
            raise RuntimeError(f"Ray did not accept that node {node.node_id} ends: {why}")

    def lose(self, node: Any) -> None:
        """Ends a node as a machine goes: the raylet and every process it has started, by SIGKILL."""
        raylet = _raylet(node)
        processes = [raylet, *raylet.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        del self._pools[node]
        _, alive = psutil.wait_procs(processes, timeout=_GONE_WITHIN_S)
        if alive:
            raise RuntimeError(f"processes of a lost node live on: {alive}")

    def processes(self) -> list[Process]:
        """Returns the processes of the run on all nodes."""
        return [
            process for node in (self._cluster.head_node, *list(self._pools)) for process in self.processes_on(node)
        ]

    def processes_on(self, node: Any) -> list[Process]:
        """Returns the processes of the run on one node."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):  # the node is being lost
            for process in _raylet(node).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    title = _TITLE.match(" ".join(process.cmdline()))
                    if title and title[1] in ROLES:
                        found.append(Process(ROLES[title[1]], process))
        return found

    def close(self) -> None:
        """Ends the cluster."""
        for node in list(self._pools):
            self.lose(node)
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


def _common() -> dict[str, Any]:
    """What all nodes are started with.

    Ports among it: a node that is to choose them itself gives its agents 15 s to do so, and ends if they need longer,
    which they do on a machine with much else to do.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in _PORTS]
        ports = [bound.getsockname()[1] for bound in sockets]
    return {"object_store_memory": _STORE_BYTES} | dict(zip(_PORTS, ports, strict=True))


def _raylet(node: Any) -> psutil.Process:
    (info,) = node.all_processes["raylet"]
    return psutil.Process(info.process.pid)
