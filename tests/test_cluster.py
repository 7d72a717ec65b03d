"""The stream on real Ray actors, without Ray Train."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import ray
from checkpoints import run, saved
from runs import is_running, named_actors, opened, reference, wait_until

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    PlacementError,
    PrefetchConfig,
    StaleIncarnationError,
    TransformContext,
    TransformError,
)
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.placement import actor_options
from ray_lance_stream.cluster.session import Session, start_session
from ray_lance_stream.cluster.source import RaySource
from ray_lance_stream.request import Ranges

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_node")]
ROWS = 1003
SMALL_BLOCKS = PrefetchConfig(block_bytes=4000, max_buffer_bytes=20_000)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("db"))
    x = np.arange(ROWS * 8, dtype=np.float32)
    columns = {"id": np.arange(ROWS), "x": pa.FixedSizeListArray.from_arrays(pa.array(x), 8)}
    lancedb.connect(path).create_table("t", pa.table(columns))
    return path


def make_stream(uri: str, **options: Any) -> LanceStream:
    settings: dict[str, Any] = {"num_splits": 12, "global_batch_size": 36, "prefetch": SMALL_BLOCKS} | options
    return LanceStream(uri, "t", **settings)


def jitter(batch: pa.RecordBatch, ctx: TransformContext) -> dict[str, Any]:
    noise = np.stack([generator.random(8, dtype=np.float32) for generator in ctx.generators()])
    return {"id": batch["id"], "x": noise + np.asarray(ctx.positions)[:, None].astype(np.float32)}


def session_of(shard: Any) -> Session:
    session: Session = shard.link.session
    return session


def prefetchers(session: Session) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = ray.get(session.coordinator.prefetchers.remote())
    return found


def widen(batch: pa.RecordBatch) -> dict[str, Any]:
    return {"id": batch["id"], "wide": np.zeros((batch.num_rows, 10_000), np.uint8)}


def test_blocks_leave_the_object_store_when_they_were_consumed(uri: str) -> None:
    """At once, and not when Python looks for cycles."""
    from benchmarks.memory import store_bytes  # here: workers import this module, too, and that one loads torch

    blocks = PrefetchConfig(block_bytes=360_000, max_buffer_bytes=1_500_000)
    gc.collect()
    with make_stream(uri, transform=widen, prefetch=blocks).open() as shard:
        before = store_bytes()
        gc.disable()
        try:
            for _ in shard.iter_batches(prefetch_batches=0):
                wait_until(lambda: store_bytes() - before <= 2_000_000, 30, "what was consumed is gone")
            wait_until(lambda: store_bytes() <= before, 30, "everything is gone")
        finally:
            gc.enable()


def test_batches_say_which_rows_they_hold(uri: str, tmp_path: Path) -> None:
    stream = make_stream(uri, filter="id % 5 != 2", transform=jitter, skip_steps=[(0, 3, 4)])
    table = stream.recipe.table.open(stream.config.identity.version)
    said: dict[int, list[pa.Table]] = {}
    with opened(stream) as shard:
        next(iter(shard.iter_batches()))
        with pytest.raises(ConfigError, match=r"only the prefetchers hold.*with_rows=True"):
            shard.explain()
        for batch in shard.iter_torch_batches(with_rows=True, micro_batch_size=12):
            rows = batch["_stream_row"].numpy()
            assert table.take(rows, ["id"])["id"].to_pylist() == batch["id"].tolist()
            assert shard.explain(batch) == shard.explain()
            said.setdefault(batch["_stream_step"][0].item(), []).append(shard.explain())
            if shard.is_step_end:
                assert shard.step == max(said)
        state = shard.state()
    assert list(said) == [2, *range(5, 23)]
    place = saved(tmp_path, state)
    for step in (2, 5, 22):
        which = ("--step", step, "--epoch", 0, "--checkpoint", place, "--global-batch-size", 36)
        told = run("explain", uri, "t", *which, "--json")
        places = pa.concat_tables(said[step]).select(["index", "split", "position", "row"])
        assert json.loads(told.stdout)["rows"] == places.to_pylist()


@pytest.mark.long
@pytest.mark.slow
def test_same_batches_after_prefetchers_were_killed_three_times(uri: str) -> None:
    stream = make_stream(uri, transform=jitter)
    with stream.open() as shard:
        calm = [(b["id"].tolist(), b["x"].tolist()) for b in shard.iter_batches()]
    assert [ids for ids, _ in calm] == list(reference(stream, 1).values())
    other_blocks = make_stream(uri, transform=jitter, prefetch=PrefetchConfig(block_bytes=500, num_actors=1))
    seen, killed = [], []
    with other_blocks.open() as shard:
        for index, batch in enumerate(shard.iter_batches(prefetch_batches=0)):
            seen.append((batch["id"].tolist(), batch["x"].tolist()))
            if index in (2, 9, 15):
                wait_until(lambda: len(prefetchers(session_of(shard))) == 1, 60, "a prefetcher is back")
                (_, pid), *_ = prefetchers(session_of(shard))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        assert shard.stats().retries >= 3
    assert len(set(killed)) == 3
    assert seen == calm


def test_a_newer_incarnation_does_not_wait_for_old_requests(uri: str) -> None:
    slow = make_stream(uri, transform=_Slow, prefetch=PrefetchConfig(num_actors=1))
    session = start_session(slow.config, Parcel.of(slow._recipe))
    try:
        old = RaySource(session.coordinator, session.begin(), retry_window_s=30)
        handle = old.plan(_spec(slow))
        asked = [old.request(handle, _cycle(c)) for c in range(40)]
        asked[0].result(60)
        new = RaySource(session.coordinator, session.begin(), retry_window_s=30)
        new.request(handle, _cycle(50)).result(60)
        (prefetcher,) = ray.get(session.coordinator.pool.remote())
        built = ray.get(prefetcher.stats.remote())
        # The first block, those two under way at the change, and the new one; the rest were dropped unread.
        assert built["blocks"] <= 5
        errors = [request.exception(60) for request in asked]
        assert sum(isinstance(error, StaleIncarnationError) for error in errors) >= 35
        assert old.retry_delay_s(next(e for e in errors if e), 1, 0.0) is None
    finally:
        session.kill()


class _Slow:
    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.2)  # stands for work; the assertion is on counts
        return batch


def _spec(stream: LanceStream) -> Any:
    from ray_lance_stream.plan import PlanSpec

    return PlanSpec(table=stream.config.identity, order=stream.config.order, epoch=0)


def _cycle(cycle: int) -> Ranges:
    return Ranges(first_split=0, num_splits=12, start=cycle, stop=cycle + 1)


def test_the_coordinator_may_die(uri: str) -> None:
    stream = make_stream(uri, filter="id >= 100")
    with stream.open() as shard:
        seen = []
        for index, batch in enumerate(shard.iter_batches(prefetch_batches=0)):
            seen.append(batch["id"].tolist())
            if index == 4:
                pid = ray.get(session_of(shard).coordinator.pid.remote())
                os.kill(pid, signal.SIGKILL)
        again = [batch["id"].tolist() for batch in shard.iter_batches()]
    want = reference(stream, 2)
    assert seen == [ids for (epoch, _), ids in want.items() if epoch == 0]
    assert again == [ids for (epoch, _), ids in want.items() if epoch == 1]


def test_close_ends_everything_at_once(uri: str) -> None:
    stream = make_stream(uri)
    shard = stream.open()
    next(iter(shard.iter_batches()))
    wait_until(lambda: len(prefetchers(session_of(shard))) == 2, 60, "both prefetchers are there")
    pids = [pid for _, pid in prefetchers(session_of(shard))]
    assert len(named_actors(stream)) == 2
    shard.close()
    wait_until(lambda: not named_actors(stream), 10, "no named actor")
    wait_until(lambda: not any(map(is_running, pids)), 10, "no prefetcher")


def test_prefetchers_that_start_late_are_used(uri: str) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(block_bytes=500, max_buffer_bytes=2000))
    with stream.open() as shard:
        began = time.monotonic()
        batches, seen = iter(shard.iter_batches(prefetch_batches=0)), []
        seen.append(next(batches)["id"].tolist())
        wait_until(lambda: len(prefetchers(session_of(shard))) == 2, 60, "both prefetchers are there")
        for batch in batches:
            seen.append(batch["id"].tolist())
            wait_until(lambda: time.monotonic() - began > 0.1 * len(seen), 10, "a trainer's step has passed")
        pool = ray.get(session_of(shard).coordinator.pool.remote())
        assert all(ray.get(prefetcher.stats.remote())["blocks"] > 0 for prefetcher in pool)
    assert seen == list(reference(stream, 1).values())


def test_stream_close_ends_shards_left_open(uri: str) -> None:
    with make_stream(uri) as stream:
        shard = stream.open()
        next(iter(shard.iter_batches()))
    wait_until(lambda: not named_actors(stream), 10, "no named actor")
    del shard


def test_a_dropped_shard_lets_its_actors_go(uri: str) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(idle_timeout_s=1))
    for _ in stream.open().iter_batches():
        break
    wait_until(lambda: not named_actors(stream), 20, "no named actor")


def test_a_shard_in_use_keeps_its_actors_beyond_the_idle_timeout(uri: str) -> None:
    stream = make_stream(uri, prefetch=PrefetchConfig(idle_timeout_s=1, block_bytes=4000, max_buffer_bytes=8000))
    with stream.open() as shard:
        batches = iter(shard.iter_batches())
        first = next(batches)
        time.sleep(4)  # a long step of the trainer's
        rest = [batch["id"].tolist() for batch in batches]
    assert [first["id"].tolist(), *rest] == list(reference(stream, 1).values())


def test_placement_that_cannot_be_met_names_label_and_nodes(uri: str) -> None:
    prefetch = PrefetchConfig(label_selector={"pool": "nowhere"}, placement_timeout_s=1)
    stream = make_stream(uri, prefetch=prefetch)
    with pytest.raises(PlacementError, match=r"'pool': 'nowhere'.*") as caught:
        stream.open()
    node = ray.get_runtime_context().get_node_id()
    assert node[:8] in str(caught.value) and "Remedy" in str(caught.value)
    wait_until(lambda: not named_actors(stream), 10, "no named actor")


def test_errors_of_the_transform_reach_the_consumer_before_the_first_step(uri: str) -> None:
    stream = make_stream(uri, transform=lambda batch: batch.slice(1))
    with pytest.raises(TransformError, match="rows"), stream.open() as shard:
        next(iter(shard.iter_batches()))
    wait_until(lambda: not named_actors(stream), 10, "no named actor")


def test_fewer_rows_than_splits_after_the_filter(uri: str) -> None:
    with pytest.raises(ConfigError, match="fewer rows than splits"), make_stream(uri, filter="id < 5").open() as shard:
        next(iter(shard.iter_batches()))


def _node(name: str, cpus: float, gpus: float = 0, **labels: str) -> dict[str, Any]:
    return {
        "NodeID": name.encode().hex().ljust(56, "0"),
        "Alive": True,
        "Resources": {"CPU": cpus, "GPU": gpus},
        "Labels": labels,
    }


def _targets(options: list[dict[str, Any]]) -> list[str]:
    return [bytes.fromhex(option["scheduling_strategy"].node_id).rstrip(b"\0").decode() for option in options]


def test_default_placement_takes_nothing_from_trainers() -> None:
    laptop = actor_options(PrefetchConfig(), [_node("a", 4)])
    assert [option["num_cpus"] for option in laptop] == [0, 0] and _targets(laptop) == ["a", "a"]
    mixed = [_node("head", 0), _node("gpu", 8, 8), _node("cpu1", 8), _node("cpu2", 8)]
    assert _targets(actor_options(PrefetchConfig(num_actors=3), mixed)) == ["cpu1", "cpu2", "cpu1"]
    only_gpu = [_node("head", 0), _node("g1", 8, 8), _node("g2", 8, 8)]
    assert _targets(actor_options(PrefetchConfig(), only_gpu)) == ["g1", "g2"]
    labelled = [*mixed, _node("data", 8, pool="data")]
    # Node types that can be started need not list memory: who asks for anything else must not ask for it.
    assert all("memory" in options for options in (*laptop, *actor_options(PrefetchConfig(), labelled)))
    for asks in (PrefetchConfig(num_cpus=1), PrefetchConfig(resources={"disk": 1})):
        assert not any("memory" in options for options in actor_options(asks, labelled))
    options = actor_options(PrefetchConfig(), labelled)
    assert all(option["label_selector"] == {"pool": "data"} for option in options)
    dead = [{**_node("data", 8, pool="data"), "Alive": False}, _node("cpu", 2)]
    assert _targets(actor_options(PrefetchConfig(num_actors=1), dead)) == ["cpu"]


def test_placement_the_user_asked_for_is_passed_on() -> None:
    config = PrefetchConfig(
        num_actors=1, num_cpus=2, resources={"disk": 1}, label_selector={"a": "b"}, runtime_env={"env_vars": {"A": "1"}}
    )
    (options,) = actor_options(config, [_node("n", 4)])
    assert options["num_cpus"] == 2 and options["resources"] == {"disk": 1}
    assert options["label_selector"] == {"a": "b"} and options["runtime_env"] == {"env_vars": {"A": "1"}}
