"""A stream as a whole, on real tables: order, coverage, lockstep, and what it refuses."""

from __future__ import annotations

import doctest
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import Tables
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    PrefetchConfig,
    StateError,
    StateMismatchError,
    TableVersionError,
    TransformError,
)
from ray_lance_stream import testing as kit
from ray_lance_stream.plan import Plan, PlanSpec
from ray_lance_stream.testing import GlobalBatch, check_resume_at_every_step, check_transform, global_batches

pytestmark = pytest.mark.usefixtures("no_threads_left")
ODD = "id % 2 = 1"


def ids(batches: list[GlobalBatch]) -> list[list[int]]:
    return [batch.columns["id"].tolist() for batch in batches]


def expected_ids(stream: LanceStream, rows: int, epoch: int = 0) -> list[list[int]]:
    """The ordered global batches by the definition: cycle by cycle, ascending split, q cycles a step."""
    config = stream.config
    matching = None if config.order.filter is None else np.arange(1, rows, 2)  # ODD
    count = rows if matching is None else len(matching)
    plan = Plan(PlanSpec(table=config.identity, order=config.order, epoch=epoch), count, matching)
    splits = config.order.num_splits
    q, length = config.global_batch_size // splits, count // splits
    if config.drop_last:
        length = length // q * q
    canonical = [
        int(plan.rows(np.array([split]), np.array([cycle]))[0]) for cycle in range(length) for split in range(splits)
    ]
    return [canonical[start : start + q * splits] for start in range(0, length * splits, q * splits)]


# --- the order of rows -------------------------------------------------------------------------------------


def test_the_global_batches_are_the_same_for_every_number_of_replicas(tables: Tables) -> None:
    stream = tables.stream(131, num_splits=12, global_batch_size=36)  # 10 cycles: steps of 3, 3, 3 and 1
    expected = expected_ids(stream, 131)
    assert list(map(len, expected)) == [36, 36, 36, 12]
    for world_size in range(1, 13):
        assert ids(global_batches(stream, world_size)) == expected, world_size


@pytest.mark.thorough
@pytest.mark.parametrize("block_bytes", [1, 700, 10**9])
@pytest.mark.parametrize("max_buffer_bytes", [1, 3000, 10**9])
@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_block_sizes_budgets_and_prefetching_do_not_change_the_order(
    tables: Tables, block_bytes: int, max_buffer_bytes: int, prefetch_batches: int
) -> None:
    prefetch = PrefetchConfig(block_bytes=block_bytes, max_buffer_bytes=max_buffer_bytes)
    stream = tables.stream(131, num_splits=12, global_batch_size=36, prefetch=prefetch)
    for micro_batch_size in (None, 5):
        found = global_batches(stream, 5, micro_batch_size=micro_batch_size, prefetch_batches=prefetch_batches)
        assert ids(found) == expected_ids(stream, 131)


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_order_and_coverage_of_any_stream(tables: Tables, data: st.DataObject) -> None:
    draw = data.draw
    rows = draw(st.sampled_from([7, 24, 61, 131]), label="rows")
    odd = draw(st.booleans(), label="filter")
    count = rows // 2 if odd else rows
    splits = draw(st.integers(1, min(count, 12)), label="splits")
    q = draw(st.integers(1, 4), label="q")
    world_size = draw(st.integers(1, splits), label="replicas")
    shuffle, drop_last = draw(st.booleans(), label="shuffle"), draw(st.booleans(), label="drop_last")
    assume(count // splits >= q or not drop_last)  # refused: no step would be left
    stream = tables.stream(
        rows,
        num_splits=splits,
        global_batch_size=q * splits,
        shuffle=shuffle,
        shuffle_seed=draw(st.integers(0, 2**64 - 1), label="seed"),
        shuffle_clump_size=draw(st.sampled_from([None, 1, 2, 5, 1000]), label="clump"),
        filter=ODD if odd else None,
        drop_last=drop_last,
        prefetch=PrefetchConfig(block_bytes=draw(st.sampled_from([1, 500, 10**6]), label="block_bytes")),
    )
    found = global_batches(stream, world_size, epoch_count=2, prefetch_batches=draw(st.sampled_from([0, 2])))
    first = [batch for batch in found if batch.epoch == 0]
    assert ids(first) == expected_ids(stream, rows)
    assert ids(found[len(first) :]) == expected_ids(stream, rows, epoch=1)
    for epoch in (first, found[len(first) :]):
        seen = [row for batch in ids(epoch) for row in batch]
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(1, rows, 2) if odd else range(rows))
        kept = count // splits // q * q * splits if drop_last else count - count % splits
        assert len(seen) == kept
    with stream.open() as shard:
        assert (shard.num_rows, shard.dropped_rows) == (kept, count - kept)


def test_epochs_and_seeds_differ_and_no_shuffle_means_table_order(tables: Tables) -> None:
    epochs = [expected_ids(tables.stream(), 50, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert ids(global_batches(tables.stream(shuffle_seed=8), 2)) != epochs[0]
    # Seed and epoch are no sum: seed 8 of epoch 0 is not seed 7 of epoch 1.
    assert ids(global_batches(tables.stream(shuffle_seed=8), 2)) != epochs[1]
    plain = global_batches(tables.stream(shuffle=False, num_splits=1, global_batch_size=50), 1, epoch_count=2)
    assert ids(plain) == [list(range(50))] * 2


def test_a_seed_is_drawn_when_none_is_given(tables: Tables) -> None:
    seeds = {tables.stream(shuffle_seed=None).config.order.shuffle_seed for _ in range(3)}
    assert len(seeds) == 3


# --- lockstep and micro-batches ----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("micro_batch_size", [None, 4, 7, 16, 10**6])
def test_all_replicas_get_equally_many_micro_batches_of_bounded_size(
    tables: Tables, micro_batch_size: int | None
) -> None:
    stream = tables.stream(131, num_splits=12, global_batch_size=48)  # steps of 4, 4 and 2 cycles
    expected = expected_ids(stream, 131)
    for world_size in range(1, 9):
        counts = set()
        for rank in range(world_size):
            sizes, scales, steps = [], 0.0, []
            with stream.open(rank=rank, world_size=world_size) as shard:
                for batch in shard.iter_batches(micro_batch_size=micro_batch_size):
                    sizes.append(len(batch["id"]))
                    scales += shard.loss_scale
                    if shard.is_step_end:
                        steps.append(len(sizes))
            assert max(sizes) <= (micro_batch_size or 48)
            assert min(sizes) >= 1
            width = 12 * (rank + 1) // world_size - 12 * rank // world_size
            assert scales == pytest.approx(3 * world_size * width / 12)
            counts.add(tuple(steps))
        assert len(counts) == 1, (world_size, counts)  # the micro-batch at which each step ends, on every rank
        # `global_batches` itself fails where replicas differ in micro-batches or loss scales do not add up.
        if world_size in (1, 5, 8):
            assert ids(global_batches(stream, world_size, micro_batch_size=micro_batch_size)) == expected


def weights_after_an_epoch(stream: LanceStream, world_size: int, micro_batch_size: int | None) -> torch.Tensor:
    """Trains a small model as data-parallel replicas would: the mean of their gradients, one optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shards = [stream.open(rank=rank, world_size=world_size) for rank in range(world_size)]
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "dtypes": {"x": torch.float64}}
    for parts in zip(*(shard.iter_torch_batches(**options) for shard in shards), strict=True):
        for shard, batch in zip(shards, parts, strict=True):
            x = batch["x"] / 131
            loss = ((model(x) - torch.sin(7 * x[:, :1])) ** 2).mean()
            (loss * shard.loss_scale / world_size).backward()  # / world_size: averaging over replicas
        if shards[0].is_step_end:
            optimizer.step()
            optimizer.zero_grad()
    for shard in shards:
        shard.close()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For a model this small, threads that wait for each other take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_torch_thread")
def test_training_gives_the_same_weights_on_1_5_or_8_replicas_with_and_without_accumulation(tables: Tables) -> None:
    stream = tables.stream(131, num_splits=12, global_batch_size=36)
    reference = weights_after_an_epoch(stream, 1, None)
    for world_size, micro_batch_size in ((8, None), (1, 5), (5, 4)):
        found = weights_after_an_epoch(stream, world_size, micro_batch_size)
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


# --- transforms --------------------------------------------------------------------------------------------


def augment(batch: pa.RecordBatch, ctx: Any) -> dict[str, Any]:
    """Random per row; says what the context said."""
    noise = np.array([g.normal(size=3) for g in ctx.generators()])
    return {
        "id": batch["id"],
        "noisy": np.array(batch["x"].to_pylist()) + noise,
        "row": ctx.row_numbers,
        "split": ctx.splits,
        "epoch": np.full(len(ctx), ctx.epoch),
    }


def test_random_augmentation_does_not_depend_on_blocks_or_replicas(tables: Tables) -> None:
    def run(world_size: int, **prefetch: int) -> list[GlobalBatch]:
        stream = tables.stream(transform=augment, prefetch=PrefetchConfig(**prefetch))  # type: ignore[arg-type]
        return global_batches(stream, world_size, epoch_count=2)

    reference = run(1)
    for batch in reference:
        assert batch.columns["id"].tolist() == batch.columns["row"].tolist()
        assert set(batch.columns["epoch"]) == {batch.epoch}
        assert batch.columns["split"].tolist() == [0, 1, 2, 3] * (len(batch.columns["split"]) // 4)
    assert not np.array_equal(reference[0].columns["noisy"], reference[6].columns["noisy"])
    for other in (run(4), run(3, block_bytes=1), run(2, block_bytes=1000, max_buffer_bytes=1)):
        for a, b in zip(other, reference, strict=True):
            assert a.columns["noisy"].tobytes() == b.columns["noisy"].tobytes()


def test_a_transform_that_breaks_does_so_before_the_first_step(tables: Tables) -> None:
    def short(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.slice(1)

    def failing(batch: pa.RecordBatch) -> Any:
        return batch["pixels"]

    for function, word in ((short, "15 rows for a batch of 16"), (failing, "pixels")):
        shard = tables.stream(num_splits=16, global_batch_size=16, transform=function).open()
        with pytest.raises(TransformError, match=word) as error:
            shard.__enter__()
        says_all(error, function.__name__)
        shard.close()


# --- what is refused ---------------------------------------------------------------------------------------


def says_all(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """A message says what is wrong, what was found, what was expected and what to do."""
    text = str(error.value)
    assert all(part in text for part in ("Found: ", "Expected: ", "Remedy: ", *words)), text


def locked(lock: Any, batch: pa.RecordBatch) -> pa.RecordBatch:
    with lock:
        return batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_splits": 0}, ["num_splits", "Found: 0"]),
        ({"num_splits": -4}, ["num_splits", "Found: -4"]),
        ({"num_splits": 4.0}, ["num_splits", "Found: 4.0"]),
        ({"num_splits": 60, "global_batch_size": 60}, ["fewer rows than splits", "50 rows", "num_splits=60"]),
        ({"global_batch_size": 10}, ["global_batch_size=10", "num_splits=4", "pass 8 or 12"]),
        ({"global_batch_size": 3}, ["global_batch_size=3", "pass 4"]),
        ({"global_batch_size": 0}, ["global_batch_size", "Found: 0"]),
        ({"global_batch_size": 52, "drop_last": True}, ["drop_last leaves no step", "12 cycles"]),
        ({"shuffle_seed": -1}, ["shuffle_seed", "Found: -1", "64 bits"]),
        ({"shuffle_seed": 2**64}, ["shuffle_seed", f"Found: {2**64}"]),
        ({"shuffle_seed": "7"}, ["shuffle_seed", "'7'"]),
        ({"shuffle_clump_size": 0}, ["shuffle_clump_size", "Found: 0"]),
        ({"shuffle": "yes"}, ["shuffle", "'yes'"]),
        ({"order": "sorted"}, ["order", "'sorted'", "feistel"]),
        ({"columns": ["id", "imgae"]}, ["'imgae'", "id, x, text"]),
        ({"columns": "id"}, ["columns", "'id'"]),
        ({"columns": []}, ["columns"]),
        ({"filter": "label = 3"}, ["label = 3", "id, x, text"]),
        ({"filter": "id >"}, ["id >"]),
        ({"version": 0}, ["version", "Found: 0"]),
        ({"transform": 3}, ["Transform int"]),
        ({"transform": lambda: None}, ["Transform"]),
        ({"transform": functools.partial(locked, threading.Lock())}, ["Transform locked", "sent to the prefetchers"]),
        ({"on_missing_state": "ignore"}, ["on_missing_state", "'ignore'"]),
        ({"allow_changes": ("num_splits",)}, ["allow_changes", "num_splits"]),
        ({"allow_changes": ("filters",)}, ["allow_changes", "filters"]),
    ],
)
def test_bad_arguments_are_refused_at_construction(tables: Tables, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        tables.stream(**options)
    says_all(error, *words)


def test_missing_and_empty_tables_are_refused(tables: Tables) -> None:
    uri, table = tables.own(10)
    table.delete("id >= 0")
    with pytest.raises(ConfigError, match="no rows") as error:
        tables.stream(uri=uri)
    says_all(error, "0 rows")
    for arguments in ((uri, "tt"), (f"{uri}/nowhere", "t")):
        with pytest.raises(ConfigError, match="does not exist") as error:
            LanceStream(*arguments, num_splits=4, global_batch_size=8)
        says_all(error)
    with pytest.raises(ConfigError, match="one way to open it") as error:
        LanceStream(table="t", num_splits=4, global_batch_size=8)
    says_all(error)
    with pytest.raises(TableVersionError, match="version 99") as version_error:
        tables.stream(version=99)
    says_all(version_error)


def test_what_the_latest_version_does_not_have_an_earlier_one_may(tables: Tables) -> None:
    uri, table = tables.own(40)
    first = table.version
    state = global_batches(tables.stream(uri=uri, filter="text != ''", columns=["id", "text"]), 2)[-1].state
    table.drop_columns(["text"])
    table.delete("id > 1")
    for options in ({"filter": "text != ''"}, {"columns": ["id", "text"]}, {}):
        with pytest.raises(ConfigError, match=rf"in version {table.version}, the latest.*pass version=") as error:
            tables.stream(uri=uri, **options)
        assert pickle.loads(pickle.dumps(error.value)).args == error.value.args
        tables.stream(uri=uri, version=first, **options)
    tables.stream(uri=uri, filter="text != ''", columns=["id", "text"], resume_from=state)


def test_a_state_of_other_data_is_refused_at_construction(tables: Tables) -> None:
    state = global_batches(tables.stream(100), 2)[-1].state
    with pytest.raises(StateMismatchError, match="shuffle_seed differs"):
        tables.stream(100, shuffle_seed=8, resume_from=state)
    assert tables.stream(100, shuffle_seed=8, resume_from=state, allow_changes=["shuffle_seed"]).open().epoch == 0


def test_a_filter_that_leaves_too_few_rows_is_refused_before_the_first_step(tables: Tables) -> None:
    with (
        pytest.raises(ConfigError, match="fewer rows than splits") as error,
        tables.stream(filter="id < 3").open(),
    ):
        pass
    says_all(error, "3 rows (after the filter)")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"world_size": 5}, ["more replicas than splits", "5 replicas", "num_splits=4", "at most 4 replicas"]),
        ({"world_size": 0}, ["Found: 0"]),
        ({"rank": 2, "world_size": 2}, ["rank", "Found: 2", "from 0 to 1"]),
        ({"rank": -1, "world_size": 2}, ["rank", "Found: -1"]),
        ({"rank": 0.5, "world_size": 2}, ["rank", "Found: 0.5"]),
    ],
)
def test_replicas_that_cannot_be_are_refused_when_opened(tables: Tables, place: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        tables.stream().open(**place)
    says_all(error, *words)


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, [1], "", 3, {"format": 2}, {"format": "1"}, {"format": True}])
def test_what_is_no_state_is_refused(tables: Tables, state: Any) -> None:
    with tables.stream().open() as shard:
        next(iter(shard))
        before = shard.state_dict()
        with pytest.raises(StateError) as error:
            shard.load_state_dict(state)
        says_all(error)
        assert shard.state_dict() == before
        assert sum(len(batch["id"]) for batch in shard) == 40  # and the stream goes on


# --- the test kit ------------------------------------------------------------------------------------------


def test_the_kits_examples_run() -> None:
    result = doctest.testmod(kit)
    assert result.attempted > 5
    assert result.failed == 0


def change_nth_state(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    from ray_lance_stream import StreamShard

    taken = StreamShard.state_dict

    def changed(self: StreamShard) -> dict[str, Any]:
        state = taken(self)
        change(state)
        return state

    monkeypatch.setattr(StreamShard, "state_dict", changed)


def test_the_harness_sees_a_state_that_is_one_step_behind(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    def behind(state: dict[str, Any]) -> None:
        for key in ("samples_consumed_per_split", "positions_consumed_per_split"):
            state[key] = [max(0, count - 2) for count in state[key]]

    change_nth_state(monkeypatch, behind)
    with pytest.raises(AssertionError, match=r"resumed after step 1 of epoch 0, from 2 to 2 replicas: step 2 .* step"):
        check_resume_at_every_step(tables.stream(), (2, 3))


def test_the_harness_sees_an_augmentation_that_is_not_repeatable(tables: Tables) -> None:
    def random(batch: pa.RecordBatch) -> dict[str, Any]:
        return {"x": np.random.default_rng().normal(size=batch.num_rows)}

    with pytest.raises(
        AssertionError, match=r"3 replicas instead of 1: step 1 of epoch 0 differs in column 'x', first"
    ):
        check_resume_at_every_step(tables.stream(transform=random), (1, 3))
    with pytest.raises(AssertionError, match="random is not row-wise or not repeatable: row 0"):
        check_transform(random, pa.table({"x": [1.0, 2.0]}))


def test_the_transform_check_sees_rows_that_depend_on_their_neighbours() -> None:
    def centred(batch: pa.RecordBatch) -> dict[str, Any]:
        x = batch["x"].to_numpy()
        return {"x": x - x.mean()}

    table = pa.table({"id": [0, 1, 2], "x": [1.0, float("nan"), 5.0]})
    with pytest.raises(AssertionError, match="centred is not row-wise"):
        check_transform(centred, table.slice(0, 1).take([0, 0]).set_column(1, "x", pa.array([1.0, 5.0])))
    assert check_transform(lambda batch: batch, table).num_rows == 3
    assert check_transform(lambda batch: {"image": np.zeros((batch.num_rows, 2, 2))}, table).num_rows == 3
