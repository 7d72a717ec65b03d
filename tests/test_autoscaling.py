"""The pools of cluster.yaml on this machine: Ray launches their nodes when a run needs them, and ends them after it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from clusters import STORE_BYTES, Head
from conftest import Tables
from loops import until_told
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from ray.autoscaler._private.util import prepare_config
from runs import delivered, fit, named_actors, read_log, reference, wait_until
from test_cluster_yaml import FACTS, load

from ray_lance_stream import LanceStream, PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault, pytest.mark.timeout(900)]
IDLE_S = 20.0  # cluster.yaml's minutes are meant for machines that take minutes to start
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


def on_this_machine(gcs_address: str) -> dict[str, Any]:
    """cluster.yaml with nodes that are processes of this machine: there is nothing to install or to log in to."""
    config: dict[str, Any] = prepare_config(load())
    for legacy in ("head_node", "worker_nodes"):
        config.pop(legacy, None)
    emptied = {key: type(value)() for key, value in config.items() if isinstance(value, (list, dict))}
    head_type = config["head_node_type"]
    types = {
        FAKE_HEAD_NODE_TYPE if name == head_type else name: {fact: kind[fact] for fact in FACTS if fact in kind}
        for name, kind in config["available_node_types"].items()
    }
    for kind in types.values():
        kind["node_config"] = {}
        kind["resources"] = kind["resources"] | {"object_store_memory": STORE_BYTES}
    provider = {
        # Not "fake_multinode": that reads a file which Ray's wheels do not hold.
        "type": "external",
        "module": _PROVIDER,
        "gcs_address": gcs_address,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    ours = {"provider": provider, "available_node_types": types, "head_node_type": FAKE_HEAD_NODE_TYPE}
    return config | emptied | ours | {"idle_timeout_minutes": IDLE_S / 60}


@pytest.fixture(scope="module")
def autoscaler() -> Iterator[None]:
    """A head whose autoscaler knows the pools, and this process connected to it."""
    with pytest.MonkeyPatch.context() as patch:
        head = Head()
        try:
            config = head.directory / "config.json"
            config.write_text(json.dumps(on_this_machine(head.address)))
            environment = {
                "PYTHONPATH": os.environ["PYTHONPATH"],
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                # A node of 8 CPUs keeps 8 processes ready otherwise.
                "RAY_prestart_worker_first_driver": "0",
            }
            cpus = load()["available_node_types"]["head"]["resources"]["CPU"]
            options = [f"--num-cpus={cpus}", "--include-dashboard=false", f"--autoscaling-config={config}"]
            head.start(environment, *options)
            patch.setenv("RAY_ADDRESS", head.address)  # for Train's questions to the cluster
            ray.init(address=head.address, log_to_driver=False)
            yield
            ray.shutdown()
        finally:
            head.stop()


def nodes_by_pool() -> Counter[str]:
    """How many nodes of each pool live; the head is in none."""
    alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return Counter(node["Labels"]["pool"] for node in alive if "pool" in node["Labels"])


def pools_of_prefetchers(stream: LanceStream) -> list[str | None]:
    """The pools of the nodes on which the prefetchers that answer are; those of the only run of a stream."""
    (name,) = [name for name in named_actors(stream) if name.endswith(".coordinator")]
    coordinator: Any = ray.get_actor(name, namespace="ray_lance_stream")
    pools = {node["NodeID"]: node["Labels"].get("pool") for node in ray.nodes()}  # type: ignore[no-untyped-call]
    return [pools[node_id] for node_id, _ in ray.get(coordinator.prefetchers.remote())]


@pytest.mark.usefixtures("autoscaler")
def test_pools_start_from_zero_for_a_run_and_go_after_it(tables: Tables, tmp_path: Path) -> None:
    prefetch = PrefetchConfig(num_cpus=1, placement_timeout_s=300)
    stream = tables.stream(403, num_splits=8, global_batch_size=16, prefetch=prefetch)
    failed: list[BaseException] = []
    assert nodes_by_pool() == {}

    def run() -> None:
        try:
            scaling = {"use_gpu": True}
            fit(until_told, {"train": stream}, 2, tmp_path, scaling=scaling, step_s=0.2, report_every=10)
        except BaseException as error:
            failed.append(error)

    def steps() -> int:
        assert not failed, failed
        return len([entry for entry in read_log(tmp_path) if "at" in entry and entry["rank"] == 0])

    training = threading.Thread(target=run)
    training.start()
    try:
        wait_until(lambda: steps() > 5, 400, "the first steps")
        assert nodes_by_pool() == {"train": 2, "data": 1}  # 8 CPUs are enough for both prefetchers
        wait_until(lambda: len(pools_of_prefetchers(stream)) == 2, 60, "both prefetchers")
        assert pools_of_prefetchers(stream) == ["data", "data"]
        # For longer than an idle node has, the pools stay, and training goes on.
        wait_until(lambda: steps() > 2 * IDLE_S / 0.2, 400, "more steps than an idle node would live for")
        assert nodes_by_pool() == {"train": 2, "data": 1}
    finally:
        (tmp_path / "log").mkdir(exist_ok=True)
        (tmp_path / "log" / "last").write_text("0")
        training.join(300)
    assert not failed and not training.is_alive()
    stream.close()
    wait_until(lambda: nodes_by_pool() == {}, 120, "the pools are at zero again")

    batches = delivered(read_log(tmp_path))
    epochs = 1 + max(epoch for epoch, _ in batches)
    assert list(batches.items()) == list(reference(stream, epochs).items())
