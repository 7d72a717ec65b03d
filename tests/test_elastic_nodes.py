"""Where prefetchers are on a cluster of several nodes, and nodes that come and go while the pool grows."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pytest
import ray
from conftest import Tables
from consumers import Consumer, Slow, pool, train
from nodes import Nodes
from ray.util.placement_group import placement_group, remove_placement_group
from runs import opened, reference, wait_until

from ray_lance_stream import PrefetchConfig
from ray_lance_stream.cluster.room import lacking

pytestmark = [pytest.mark.cluster, pytest.mark.fault]
ROWS = 4000


# A CPU for each, of which a loader node has one.
ONE_A_NODE = PrefetchConfig(
    num_actors=(1, 2), num_cpus=1, block_bytes=400, max_buffer_bytes=8000, placement_timeout_s=120, shrink_after_s=3
)


def size(shard: Any) -> tuple[int, int]:
    """How many prefetchers work, and how many there should be."""
    last = ray.get(shard.link.session.coordinator.sizes.remote())[-1]
    return last.running, last.wanted


def free_cpus() -> float:
    """CPUs of the whole cluster that nobody has reserved."""
    resources: Any = ray.available_resources  # untyped
    return float(resources().get("CPU", 0))


class _Where:
    """Says of every row on which node it was decoded."""

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        return {"id": batch["id"], "node": [ray.get_runtime_context().get_node_id()] * len(batch)}


def test_with_loader_nodes_trainers_neither_read_nor_decode(nodes: Nodes, tables: Tables) -> None:
    loaders = {nodes.add_loader().node_id for _ in range(2)}
    trainer = nodes.add_trainer()
    prefetch = PrefetchConfig(num_actors=(2, 4), block_bytes=400, max_buffer_bytes=4000, placement_timeout_s=120)
    stream = tables.stream(400, transform=_Where(), prefetch=prefetch)
    task: Any = ray.remote(train)  # its hints take the arguments for references
    where, decoded_on, ids, loaded = ray.get(task.options(num_gpus=1).remote(stream), timeout=200)
    assert where == trainer.node_id
    assert decoded_on and decoded_on <= loaders
    assert loaded == set()
    assert ids == list(reference(tables.stream(400), 1).values())


def test_nodes_that_come_take_those_that_wait_and_may_be_lost_again(nodes: Nodes, tables: Tables) -> None:
    first = nodes.add_loader()
    stream = tables.stream(ROWS, transform=Slow(), prefetch=ONE_A_NODE)
    with opened(stream) as shard:
        consumer = Consumer(shard)
        consumer.read_until(lambda: size(shard) == (1, 2), "one waits for a node")
        steps = len(consumer.seen)
        consumer.read_until(lambda: len(consumer.seen) > steps + 50, "the stream goes on meanwhile")
        assert size(shard) == (1, 2)
        second = nodes.add_loader()
        consumer.read_until(
            lambda: {node for node, _ in pool(shard)} == {first.node_id, second.node_id}, "one on each node"
        )
        nodes.lose(second)
        consumer.read_until(lambda: size(shard) == (1, 2), "it waits for a node again")
        # Slower: one is enough.
        consumer.read_until(lambda: size(shard) == (1, 1), "it is given up", pause_s=0.5)
        third = nodes.add_loader()
        consumer.read_until(
            lambda: {node for node, _ in pool(shard)} == {first.node_id, third.node_id}, "a new one on a new node"
        )
        consumer.check(tables.stream(ROWS))
    wait_until(lambda: free_cpus() == 2, 30, "nothing runs on the loader nodes")


def test_one_that_waits_for_a_node_goes_with_the_stream(nodes: Nodes, tables: Tables) -> None:
    nodes.add_loader()
    with opened(tables.stream(ROWS, transform=Slow(), prefetch=ONE_A_NODE)) as shard:
        Consumer(shard).read_until(lambda: size(shard) == (1, 2), "one waits for a node")
    nodes.add_loader()
    wait_until(lambda: free_cpus() == 2, 30, "both nodes are free")
    time.sleep(3)  # more than a prefetcher that still waited would need to be placed
    assert free_cpus() == 2


def test_a_node_lost_with_places_of_workers_is_told(nodes: Nodes) -> None:
    first, _ = nodes.add_trainer(), nodes.add_trainer()
    group: Any = placement_group([{"GPU": 1}, {"GPU": 1}], strategy="SPREAD")
    try:
        assert ray.get(group.ready(), timeout=60)
        assert lacking() is None
        nodes.lose(first)
        wait_until(lambda: (lacking() or "").startswith("Ray has no room for 1 x 1 GPU;"), 60, "it is told")
        assert "a node was lost" in str(lacking()) and "add a node" in str(lacking())
    finally:
        remove_placement_group(group)
