"""Whole nodes that are lost, and objects with them, without Ray Train."""

from __future__ import annotations

import os
import signal
from random import Random
from typing import Any

import pytest
import ray
from conftest import Tables
from nodes import Nodes
from runs import opened, reference, wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault]
# A CPU for each: one prefetcher on every loader node.
SMALL_BLOCKS = PrefetchConfig(num_cpus=1, block_bytes=2000, max_buffer_bytes=8000, placement_timeout_s=120)


def places(shard: Any) -> list[tuple[str, int]]:
    """(node, process id) of the prefetchers that answer."""
    found: list[tuple[str, int]] = ray.get(shard.link.session.coordinator.prefetchers.remote())
    return found


def test_actors_are_where_they_belong(nodes: Nodes, tables: Tables) -> None:
    # The nodes with a GPU come first and are more: left to chance, some actor would be on one of them.
    trainers = {nodes.add_trainer().node_id for _ in range(3)}
    plain = nodes.add_plain().node_id
    with opened(tables.stream(prefetch=PrefetchConfig(num_actors=3, placement_timeout_s=120))) as shard:
        wait_until(lambda: len(places(shard)) == 3, 120, "all of them have started")
        assert {node for node, _ in places(shard)} == {plain}
        here = ray.get_runtime_context().get_node_id()
        assert here not in trainers
        assert nodes.of_actors(shard.link.session.session_id) == {"coordinator": here, "manager": here}


def test_a_loader_node_is_lost_in_the_middle_of_an_epoch(nodes: Nodes, tables: Tables, rng: Random) -> None:
    first, second = nodes.add_loader(), nodes.add_loader()
    stream = tables.stream(2000, prefetch=SMALL_BLOCKS)
    seen: list[list[int]] = []
    fault_at = rng.randrange(5, 60)
    with opened(stream) as shard:
        wait_until(lambda: {node for node, _ in places(shard)} == {first.node_id, second.node_id}, 120, "one on each")
        for batch in shard.iter_batches(prefetch_batches=0):
            seen.append(batch["id"].tolist())
            if shard.step == fault_at:
                nodes.lose(second)
        # One was enough to go on. With a new node there are two again.
        third = nodes.add_loader()
        wait_until(lambda: {node for node, _ in places(shard)} == {first.node_id, third.node_id}, 120, "two again")
        # Two at once: the state manager, and a prefetcher.
        manager = shard.link.session.manager
        for batch in shard.iter_batches(prefetch_batches=0):
            seen.append(batch["id"].tolist())
            if shard.step == fault_at:
                was = ray.get(manager.pid.remote())
                os.kill(was, signal.SIGKILL)
                os.kill(places(shard)[0][1], signal.SIGKILL)
        assert ray.get(manager.pid.remote()) != was

        def heard() -> bool:
            return bool(ray.get(manager.where.remote()).epoch_and_step == (2, 0))

        wait_until(heard, 10, "it heard of what came after")
    assert seen == list(reference(stream, 2).values())


def test_a_list_of_rows_that_is_lost_with_its_node_is_made_again(nodes: Nodes, tables: Tables, rng: Random) -> None:
    first = nodes.add_loader()
    # More than travels within an answer: 30,000 rows of 8 bytes lie in the node's object store.
    prefetch = PrefetchConfig(num_actors=1, block_bytes=20_000, max_buffer_bytes=80_000, placement_timeout_s=120)
    options: dict[str, Any] = {"filter": "id >= 10000", "global_batch_size": 400, "prefetch": prefetch}
    stream = tables.stream(40_000, **options)
    seen: list[list[int]] = []
    fault_at = rng.randrange(5, 60)
    with opened(stream) as shard:
        before = shard._open_plan().matching_rows
        for batch in shard.iter_batches(prefetch_batches=0):
            seen.append(batch["id"].tolist())
            if shard.step == fault_at:
                nodes.add_loader()
                nodes.lose(first)
        for batch in shard.iter_batches():
            seen.append(batch["id"].tolist())
        after: Any = ray.get(shard.link.session.coordinator.ensure.remote(shard._handle.spec))
    assert before is not None and after.matching_rows != before
    assert seen == list(reference(stream, 2).values())
