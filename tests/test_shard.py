"""One shard in this process: formats, options, what it says of itself, and how it ends."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from blocks import BLOCK
from conftest import Tables, stream_threads
from runs import wait_until

from ray_lance_stream import (
    ConfigError,
    PrefetchConfig,
    StateError,
    StreamClosedError,
    StreamShard,
    TransformError,
    collate,
)
from ray_lance_stream.block import BlockRecipe
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.errors import TableVersionError
from ray_lance_stream.local import LocalLink, LocalSource
from ray_lance_stream.location import TableRef
from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.reader import LONGEST_TRANSFORM_S
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import Whole
from ray_lance_stream.source import BlockSource
from ray_lance_stream.topology import Seat

pytestmark = pytest.mark.usefixtures("no_threads_left")
TINY = PrefetchConfig(block_bytes=1, max_buffer_bytes=1)


def says_all(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """A message says what is wrong, what was found, what was expected and what to do."""
    text = str(error.value)
    assert all(part in text for part in ("Found: ", "Expected: ", "Remedy: ", *words)), text


# --- formats -----------------------------------------------------------------------------------------------


def test_numpy_batches_have_the_columns_of_the_table(tables: Tables) -> None:
    with tables.stream(shuffle=False).open() as shard:
        batch = next(iter(shard.iter_batches()))
    assert batch["id"].tolist() == [0, 12, 24, 36, 1, 13, 25, 37]
    assert batch["id"].dtype == np.int64
    assert batch["x"].shape == (8, 3) and batch["x"].dtype == np.float64
    assert batch["x"][1].tolist() == [12.0, 12.25, 12.5]
    assert batch["text"].tolist()[:2] == ["row 0", "row 12"]


def test_all_formats_give_the_same_rows(tables: Tables) -> None:
    with tables.stream().open() as shard:
        state = shard.state_dict()
        expected = [batch["id"].tolist() for batch in shard.iter_batches()]

        def again(batches: Any) -> list[list[int]]:
            return [list(np.asarray(batch["id"])) for batch in batches]

        for prefetch_batches in (0, 2):
            for batches in (
                shard.iter_batches(batch_format="pyarrow", prefetch_batches=prefetch_batches),
                shard.iter_batches(batch_format="pandas", prefetch_batches=prefetch_batches),
                shard.iter_batches(zero_copy=True, prefetch_batches=prefetch_batches),
                shard.iter_torch_batches(prefetch_batches=prefetch_batches),
                shard.iter_torch_batches(zero_copy=True, prefetch_batches=prefetch_batches),
                shard,
            ):
                shard.load_state_dict(state)
                assert again(batches) == expected
        shard.load_state_dict(state)
        assert isinstance(next(iter(shard.iter_batches(batch_format="pyarrow"))), pa.Table)
        assert type(next(iter(shard.iter_batches(batch_format="pandas")))).__name__ == "DataFrame"
        assert isinstance(next(iter(shard))["x"], torch.Tensor)


def test_torch_batches_dtypes_and_device(tables: Tables) -> None:
    with tables.stream().open() as shard:
        batch = next(iter(shard.iter_torch_batches()))
        assert batch["id"].dtype == torch.int64 and batch["x"].dtype == torch.float64 and batch["x"].shape == (8, 3)
        assert isinstance(batch["text"], list) and batch["x"].device.type == "cpu"
        batch = next(iter(shard.iter_torch_batches(dtypes=torch.float32)))
        assert batch["id"].dtype == batch["x"].dtype == torch.float32
        batch = next(iter(shard.iter_torch_batches(dtypes={"x": torch.float16}, device="cpu", pin_memory=True)))
        assert batch["id"].dtype == torch.int64 and batch["x"].dtype == torch.float16
        with pytest.raises(ConfigError, match="'nope'"):
            next(iter(shard.iter_torch_batches(dtypes={"nope": torch.float32})))


def test_batches_are_the_trainers_own_memory_unless_asked_otherwise(tables: Tables) -> None:
    with tables.stream().open() as shard:
        state = shard.state_dict()
        first = [batch["x"].copy() for batch in shard.iter_batches()]
        shard.load_state_dict(state)
        for batch in shard.iter_batches(prefetch_batches=0):
            batch["x"] += 1000  # in place: no other batch may see it
        shard.load_state_dict(state)
        views = [batch["x"] for batch in shard.iter_batches(zero_copy=True)]
        assert all(np.array_equal(a, b) for a, b in zip(views, first, strict=True))
        assert not views[0].flags.writeable and not views[0].flags.owndata
        shard.load_state_dict(state)
        owned = next(iter(shard.iter_batches()))["x"]
        assert owned.flags.writeable and not np.shares_memory(owned, views[0])


def test_arrow_batches_do_not_keep_the_block_unless_asked_to(tables: Tables) -> None:
    def code(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column("word", batch["text"].dictionary_encode())

    with tables.stream(transform=code).open() as shard:
        state = shard.state_dict()
        copies = list(shard.iter_batches(batch_format="pyarrow"))
        shard.load_state_dict(state)
        views = list(shard.iter_batches(batch_format="pyarrow", zero_copy=True))
    assert copies == views
    for copy, view in zip(copies, views, strict=True):
        assert copy.get_total_buffer_size() < 0.6 * view.get_total_buffer_size()  # of the whole block


def test_an_arrow_copy_shares_no_memory_of_any_column() -> None:
    table = BLOCK.select([name for name in BLOCK.column_names if name != "nothing"])  # nulls have no memory
    parts = [table.slice(2, 3), table.slice(5, 6)]

    def memory(array: Any) -> set[int]:
        if isinstance(array, pa.ExtensionArray):
            return memory(array.storage)
        inner = memory(array.dictionary) if pa.types.is_dictionary(array.type) else set()
        return inner | {buffer.address for buffer in array.buffers() if buffer is not None and buffer.size}

    def memory_of(tables: list[pa.Table], name: str) -> set[int]:
        return {place for table in tables for chunk in table[name].chunks for place in memory(chunk)}

    copy, view = collate.to_arrow(parts), collate.to_arrow(parts, copy=False)
    assert copy == view == table.slice(2, 9)
    for name in table.column_names:
        assert memory_of([view], name) <= memory_of([table], name)
        assert memory_of([copy], name).isdisjoint(memory_of([table], name)), name


def test_collate_fn_gets_numpy_and_its_result_is_yielded(tables: Tables) -> None:
    def collate(batch: dict[str, Any]) -> tuple[int, float]:
        return len(batch["id"]), float(batch["x"].sum())

    with tables.stream().open() as shard:
        assert next(iter(shard.iter_torch_batches(collate_fn=collate))) == (8, pytest.approx(24 * 25, rel=2))
        for extra in ({"dtypes": torch.float32}, {"pin_memory": True}):
            with pytest.raises(ConfigError, match="collate_fn") as error:
                shard.iter_torch_batches(collate_fn=collate, **extra)
            says_all(error)


# --- options -----------------------------------------------------------------------------------------------


def test_batch_size_is_accepted_where_it_is_this_replicas_share(tables: Tables) -> None:
    stream = tables.stream(num_splits=5, global_batch_size=10)
    for rank, share in ((0, 4), (1, 6)):
        with stream.open(rank=rank, world_size=2) as shard:
            assert len(next(iter(shard.iter_batches(batch_size=share)))["id"]) == share
            with pytest.raises(ConfigError, match="batch_size") as error:
                shard.iter_torch_batches(batch_size=5)
            says_all(error, "batch_size=5", f"Expected: {share}", f"replica {rank} of 2", "micro_batch_size")


def test_options_that_would_break_the_order_are_refused_before_the_first_batch(tables: Tables) -> None:
    with tables.stream().open() as shard:
        for options, word in (
            ({"local_shuffle_buffer_size": 100}, "local_shuffle_buffer_size"),
            ({"drop_last": True}, "drop_last"),
            ({"prefetch_batches": -1}, "prefetch_batches"),
            ({"prefetch_batches": 1.5}, "prefetch_batches"),
            ({"micro_batch_size": 0}, "micro_batch_size"),
            ({"micro_batch_size": "8"}, "micro_batch_size"),
        ):
            for method in (shard.iter_batches, shard.iter_torch_batches):
                with pytest.raises(ConfigError, match=word) as error:
                    method(**options)
                says_all(error)
        with pytest.raises(ConfigError, match="batch_format") as error:
            shard.iter_batches(batch_format="tensorflow")  # type: ignore[arg-type]
        says_all(error, "tensorflow", "numpy")
    with tables.stream(drop_last=True).open() as shard:
        assert all(len(batch["id"]) == 8 for batch in shard.iter_batches(drop_last=True))


def test_micro_batches_too_small_for_a_replica_are_refused_with_what_works(tables: Tables) -> None:
    # 5 splits on 4 replicas own 1, 1, 1 and 2: a share of 1 and 2 rows in the short last step of one cycle.
    stream = tables.stream(num_splits=5, global_batch_size=15)  # 10 cycles: the last step has one
    with stream.open(rank=0, world_size=4) as shard:
        with pytest.raises(ConfigError, match="micro_batch_size") as error:
            shard.iter_batches(micro_batch_size=1)
        says_all(error, "pass micro_batch_size=2 or more")
        assert sum(len(batch["id"]) for batch in shard.iter_batches(micro_batch_size=2)) == 10


def test_loss_scale_and_step_ends_of_micro_batches(tables: Tables) -> None:
    with tables.stream(50, global_batch_size=20).open() as shard:  # 12 cycles, steps of 5, 5 and 2
        assert (shard.is_step_end, shard.loss_scale) == (True, 1.0)
        seen = []
        for batch in shard.iter_batches(micro_batch_size=8, prefetch_batches=3):
            seen.append((shard.step, len(batch["id"]), shard.loss_scale, shard.is_step_end))
    full = [(6, 6 / 20, False), (7, 7 / 20, False), (7, 7 / 20, True)]
    assert [entry[1:] for entry in seen] == [*full, *full, (8, 1.0, True)]
    assert [step for step, _, _, end in seen if end] == [1, 2, 3]


def test_a_state_can_only_be_taken_between_steps(tables: Tables) -> None:
    with tables.stream().open() as shard:
        batches = iter(shard.iter_batches(micro_batch_size=4))
        next(batches)
        for take in (shard.state_dict, shard.state):
            with pytest.raises(StateError, match="end of a step") as error:
                take()
            says_all(error, "is_step_end")
        next(batches)
        assert shard.state_dict()["samples_consumed_per_split"] == [2] * 4


# --- what it says of itself --------------------------------------------------------------------------------


def test_counts_of_rows_steps_and_epochs(tables: Tables) -> None:
    stream = tables.stream(51, global_batch_size=20)  # 12 cycles in 3 steps, 3 rows left out
    with stream.open(rank=1, world_size=2, name="mine") as shard:
        assert (len(shard), shard.num_rows, shard.dropped_rows, shard.epoch, shard.step) == (3, 48, 3, 0, 0)
        assert (shard.name, shard.replica.dp_rank, shard.replica.dp_size) == ("mine", 1, 2)
        assert [shard.step for _ in shard.iter_batches(prefetch_batches=8)] == [1, 2, 3]
        assert (shard.epoch, shard.step) == (1, 0)
        assert [(shard.epoch, shard.step) for _ in shard] == [(1, 1), (1, 2), (1, 3)]
        stats = shard.stats()
        assert (stats.rows, stats.batches, stats.retries, stats.buffered_bytes) == (48, 6, 0, 0)
        assert stats.wait_s > 0 and 0 < stats.wait_share <= 1


def test_waiting_is_told_from_training(tables: Tables) -> None:
    with tables.stream().open() as shard:
        for _ in shard.iter_batches(prefetch_batches=2):
            time.sleep(0.02)
        stats = shard.stats()
    assert stats.train_s >= 6 * 0.02
    assert stats.wait_share < 0.9


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_the_length_of_batches_is_what_is_left_of_them(tables: Tables, micro_batch_size: int | None) -> None:
    with tables.stream(51, global_batch_size=20).open() as shard:  # 12 cycles: steps of 5, 5 and 2
        batches = shard.iter_batches(micro_batch_size=micro_batch_size)
        whole = len(batches)
        assert whole == (3 if micro_batch_size is None else 7 + 7 + 3)
        for left, _ in zip(reversed(range(whole)), batches, strict=True):
            # With the last batch the loop may be left, and the next one is the next epoch's.
            assert len(batches) == (left or whole)
        assert len(batches) == whole
        state = shard.state_dict()
        assert len([*batches]) == whole
    with tables.stream(51, global_batch_size=8).open() as shard:  # 10 cycles are 5 steps of these
        shard.load_state_dict(
            state | dict.fromkeys(("samples_consumed_per_split", "positions_consumed_per_split"), [5] * 4)
        )
        batches = shard.iter_batches(micro_batch_size=micro_batch_size)
        assert len(batches) == len(list(batches)) == (4 if micro_batch_size is None else 2 + 3 * 3)
    with tables.stream().open() as shard:
        for _ in zip(range(len(shard)), shard, strict=False):
            pass
        end = shard.state_dict()
        shard.load_state_dict(end)
        assert len(shard.iter_batches()) == 0


def test_a_budget_without_room_to_read_ahead_is_told_of_once(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    with tables.stream(prefetch=PrefetchConfig(max_buffer_bytes=500)).open(world_size=2, name="mine") as shard:
        for _ in range(2):
            list(shard.iter_batches())
    assert len(caplog.messages) == 1
    assert all(word in caplog.text for word in ("'mine'", "no room to read ahead", "max_buffer_bytes=...) to 1 MiB"))
    with tables.stream().open() as shard:
        list(shard.iter_batches())
    assert len(caplog.messages) == 1


def test_each_worker_gets_an_equal_part_of_the_budget(tables: Tables) -> None:
    prefetch = PrefetchConfig(max_buffer_bytes=9000, block_bytes=500)
    with tables.stream(500, num_splits=6, global_batch_size=6, prefetch=prefetch).open(world_size=3) as shard:
        buffered = [shard.stats().buffered_bytes for _ in shard.iter_batches(prefetch_batches=0)]
    assert 1500 < max(buffered) < 1.1 * 9000 / 3  # what is asked for is estimated until it is here


# --- iterating again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_after_a_break_iterating_again_continues_with_the_next_row(tables: Tables, prefetch_batches: int) -> None:
    with tables.stream(prefetch=TINY).open() as shard:
        state = shard.state_dict()
        whole = [batch["id"].tolist() for batch in shard.iter_batches(micro_batch_size=3)]
        shard.load_state_dict(state)
        pieces: list[list[int]] = []
        for stop in (1, 2, 1, 3, 1, 1, 2, 100):  # micro-batches at a time: breaks fall within steps too
            batches = shard.iter_batches(micro_batch_size=3, prefetch_batches=prefetch_batches)
            for taken, batch in enumerate(batches, 1):
                pieces.append(batch["id"].tolist())
                if taken == stop:
                    break
        assert pieces == whole
        assert shard.epoch == 1


def test_leaving_with_the_last_batch_goes_on_with_the_next_epoch(tables: Tables) -> None:
    with tables.stream().open() as shard:
        first = [batch["id"].tolist() for _, batch in zip(range(len(shard)), shard.iter_batches(), strict=False)]
        assert (shard.epoch, shard.step) == (0, len(shard))
        end = shard.state_dict()
        second = [batch["id"].tolist() for batch in shard.iter_batches()]
    assert first != second
    with tables.stream().open() as shard:  # after a resume the code at the end of the epoch runs once
        shard.load_state_dict(end)
        assert list(shard.iter_batches()) == []
        assert [batch["id"].tolist() for batch in shard.iter_batches()] == second
    assert len(first) == len(second) == 6


def test_a_bad_row_far_ahead_does_not_keep_back_the_good_ones_before_it(tables: Tables) -> None:
    with tables.stream().open() as shard:
        want = [batch["id"].tolist() for batch in shard.iter_batches()]

    def fail_late(batch: pa.RecordBatch) -> pa.RecordBatch:
        if want[4][0] in batch["id"].to_pylist():
            raise ValueError("a bad row")
        return batch

    small = PrefetchConfig(block_bytes=1)
    with tables.stream(transform=fail_late, prefetch=small).open() as shard:
        got = []
        for _ in range(2):  # asked for again, it fails again
            with pytest.raises(TransformError, match="a bad row"):
                for batch in shard.iter_batches(prefetch_batches=2):
                    got.append(batch["id"].tolist())
    assert got == want[:4]


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_an_iteration_that_failed_does_not_look_like_one_that_ended(tables: Tables, prefetch_batches: int) -> None:
    failures = [ValueError("once")]

    def fail_once(batch: dict[str, Any]) -> Any:
        if failures and batch["id"].tolist() == want[1]:
            raise failures.pop()
        return batch["id"].tolist()

    with tables.stream().open() as shard:
        want = [batch["id"].tolist() for batch in shard.iter_batches()]
    with tables.stream().open() as shard:
        batches = shard.iter_torch_batches(collate_fn=fail_once, prefetch_batches=prefetch_batches)
        first = iter(batches)
        got = [next(first)]
        with pytest.raises(ValueError, match="once"):
            next(first)
        for _ in range(2):
            with pytest.raises(StreamClosedError, match=r"ended with ValueError; iterate anew"):
                next(first)
        again = iter(batches)
        assert got + list(again) == want
        with pytest.raises(StopIteration):  # this one did end
            next(again)


def test_the_cut_of_a_step_under_way_cannot_change(tables: Tables) -> None:
    with tables.stream().open() as shard:
        next(iter(shard.iter_batches(micro_batch_size=4)))
        for size in (None, 2):
            with pytest.raises(ConfigError, match="middle of a step") as error:
                shard.iter_batches(micro_batch_size=size)
            says_all(error, "Expected: 4")
        assert len(next(iter(shard.iter_batches(micro_batch_size=4)))["id"]) == 4
        assert shard.is_step_end
        assert len(next(iter(shard.iter_batches()))["id"]) == 8


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_of_two_iterations_the_older_one_ends(tables: Tables, prefetch_batches: int) -> None:
    with tables.stream().open() as shard:
        batches = shard.iter_batches(prefetch_batches=prefetch_batches)
        expected = [batch["id"].tolist() for batch in batches]
        shard.load_state_dict(tables.stream().open().state_dict())
        older = iter(batches)
        assert next(older)["id"].tolist() == expected[0]
        newer = iter(batches)
        with pytest.raises(StreamClosedError, match="newer iteration"):
            next(older)
        assert [batch["id"].tolist() for batch in newer] == expected[1:]
        with pytest.raises(StreamClosedError):
            next(older)


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_a_loaded_state_ends_the_iteration_under_way(tables: Tables, prefetch_batches: int) -> None:
    with tables.stream().open() as shard:
        batches = iter(shard.iter_batches(prefetch_batches=prefetch_batches))
        next(batches)
        state = shard.state_dict()
        rest = next(batches)["id"].tolist()
        next(batches)
        time.sleep(0.05)  # more batches are ready by now
        shard.load_state_dict(state)
        with pytest.raises(StreamClosedError, match="load_state_dict"):
            next(batches)
        assert shard.state_dict() == state
        assert next(iter(shard))["id"].tolist() == rest


# --- the end -----------------------------------------------------------------------------------------------


class Boom(Exception):
    """Raised by a loop or a collate_fn."""


def leave_by_exhaustion(shard: StreamShard) -> None:
    for _ in shard.iter_batches(prefetch_batches=8):
        pass


def leave_by_break(shard: StreamShard) -> None:
    for _ in shard.iter_batches(prefetch_batches=8):
        break


def leave_by_exception(shard: StreamShard) -> None:
    with pytest.raises(Boom):
        for _ in shard.iter_batches(prefetch_batches=8):
            raise Boom


def leave_by_a_broken_collate_fn(shard: StreamShard) -> None:
    seen: list[int] = []

    def broken(batch: dict[str, Any]) -> Any:
        assert len(batch["id"]) == 8
        if len(seen) == 2:
            raise Boom
        seen.append(shard.step)
        return batch

    with pytest.raises(Boom):
        list(shard.iter_torch_batches(collate_fn=broken, prefetch_batches=8))


WAYS = [leave_by_exhaustion, leave_by_break, leave_by_exception, leave_by_a_broken_collate_fn]


@pytest.mark.parametrize("leave", WAYS)
def test_leaving_a_loop_ends_its_thread_and_close_ends_the_others(
    tables: Tables, leave: Callable[[StreamShard], None]
) -> None:
    shard = tables.stream(prefetch=TINY).open()
    leave(shard)
    wait_until(lambda: "lance-stream-prefetch" not in stream_threads(), 10, "its thread has ended")
    next(iter(shard))  # still of use
    shard.close()
    assert not [name for name in stream_threads() if name.startswith("lance-stream-prefetch")]


@pytest.mark.thorough
@pytest.mark.parametrize("leave", [*WAYS, lambda shard: next(iter(shard))])
def test_a_shard_that_is_dropped_without_close_frees_its_threads(
    tables: Tables, leave: Callable[[StreamShard], None]
) -> None:
    before = len(stream_threads())
    shard = tables.stream(prefetch=TINY).open()
    leave(shard)
    del shard

    def freed() -> bool:
        gc.collect()  # a thread that has only just ended, or an exception that went through one, leaves cycles
        return len(stream_threads()) == before

    wait_until(freed, 10, "all threads have ended")


@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_close_ends_an_iteration_that_someone_still_holds(tables: Tables, prefetch_batches: int) -> None:
    before = stream_threads()
    shard = tables.stream().open()
    batches = iter(shard.iter_batches(prefetch_batches=prefetch_batches))
    next(batches)
    time.sleep(0.05)  # more batches are ready by now
    state = shard.state_dict()
    shard.close()
    assert stream_threads() == before
    with pytest.raises(StreamClosedError, match="closed"):
        next(batches)
    assert state["samples_consumed_per_split"] == [2] * 4


def test_a_closed_shard_says_so_and_may_be_closed_again(tables: Tables) -> None:
    with tables.stream().open() as shard:
        batches = shard.iter_batches()
        next(iter(batches))
    assert shard.closed
    # What it was handed last stays known, for a checkpoint after the loop.
    assert (shard.epoch, shard.step, shard.state_dict()["samples_consumed_per_split"]) == (0, 1, [2] * 4)
    shard.close()
    uses: list[Callable[[], Any]] = [
        lambda: iter(shard),
        lambda: next(iter(batches)),
        lambda: len(shard),
        lambda: shard.load_state_dict(shard.state_dict()),
        shard.iter_batches,
        shard.__enter__,
    ]
    for use in uses:
        with pytest.raises(StreamClosedError, match=r"StreamShard\('train', replica 0 of 1\) is closed"):
            use()
    never_used = tables.stream().open()
    never_used.close()
    with pytest.raises(StreamClosedError):
        never_used.state_dict()


class Broken(LocalLink):
    """Opens sources whose plans fail, or wait for the source to be closed."""

    def __init__(self, recipe: BlockRecipe, *, broken_epochs: set[int], waits: bool = False) -> None:
        super().__init__(recipe)
        self.broken_epochs, self.waits = broken_epochs, waits
        self.waiting, self.stopped, self.link_closed = threading.Event(), threading.Event(), False

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        link, source = self, super().open_source(config, seat)

        class Source(LocalSource):
            def __init__(self) -> None: ...

            def plan(self, spec: PlanSpec) -> PlanHandle:
                if spec.epoch not in link.broken_epochs:
                    return source.plan(spec)
                link.waiting.set()
                if link.waits and link.stopped.wait(10):
                    raise StreamClosedError("given up")
                raise TableVersionError("gone")

            def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Whole]:
                return source.request(handle, ranges)

            def close(self) -> None:
                link.stopped.set()
                source.close()
                if link.waits:
                    return
                raise ConnectionError("the source cannot be closed")

        return Source()

    def close(self) -> None:
        self.link_closed = True


def broken_shard(tables: Tables, **options: Any) -> tuple[StreamShard, Broken]:
    stream = tables.stream()
    link = Broken(BlockRecipe(table=TableRef(uri=tables.uri(50), name="t")), **options)
    return StreamShard(stream.config, Seat(), link), link


def test_a_shard_that_cannot_be_opened_is_closed(tables: Tables) -> None:
    shard, link = broken_shard(tables, broken_epochs={0})
    with pytest.raises(ConnectionError), shard:
        pass
    assert shard.closed and link.link_closed


def test_the_link_is_closed_even_if_the_source_is_not(tables: Tables) -> None:
    shard, link = broken_shard(tables, broken_epochs=set())
    assert len(shard) == 6
    with pytest.raises(ConnectionError, match="cannot be closed"):
        shard.close()
    assert shard.closed and link.link_closed
    shard.close()


def test_a_state_is_loaded_though_the_streams_own_plan_cannot_be_opened(tables: Tables) -> None:
    with tables.stream().open() as shard:
        list(shard)
        state = shard.state_dict()
        want = next(iter(shard))["id"].tolist()
    shard, _ = broken_shard(tables, broken_epochs={0}, waits=True)
    shard.load_state_dict(state)
    assert (shard.epoch, next(iter(shard))["id"].tolist()) == (1, want)
    shard.close()


def test_close_ends_a_wait_for_a_plan(tables: Tables) -> None:
    shard, link = broken_shard(tables, broken_epochs={0}, waits=True)
    out: list[BaseException] = []

    def use() -> None:
        try:
            len(shard)
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    assert link.waiting.wait(10)
    began = time.monotonic()
    shard.close()
    thread.join(5)
    assert time.monotonic() - began < 5
    assert not thread.is_alive() and isinstance(out[0], StreamClosedError)


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_close_from_another_thread_ends_a_loop_at_any_moment(tables: Tables, prefetch_batches: int) -> None:
    for attempt in range(12):
        shard = tables.stream(500, prefetch=TINY).open()
        started = threading.Event()
        out: list[BaseException] = []

        def loop(shard: StreamShard = shard, started: threading.Event = started, out: list[Any] = out) -> None:
            try:
                while True:
                    for _ in shard.iter_batches(prefetch_batches=prefetch_batches):
                        started.set()
            except BaseException as error:
                out.append(error)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        started.wait(10)
        time.sleep(attempt * 0.003)
        shard.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(out[0], StreamClosedError), repr(out[0])


def test_an_unused_shard_can_be_pickled_a_used_one_refuses(tables: Tables) -> None:
    shard = tables.stream().open(rank=1, world_size=2)
    copy = pickle.loads(pickle.dumps(shard))
    with shard, copy:
        assert copy.replica == shard.replica
        assert next(iter(copy))["id"].tolist() == next(iter(shard))["id"].tolist()
        with pytest.raises(TypeError, match="LanceStream"):
            pickle.dumps(shard)


def test_the_stream_itself_is_a_context_manager_and_pickles(tables: Tables) -> None:
    with tables.stream() as stream:
        copy = pickle.loads(pickle.dumps(stream))
        assert copy.config == stream.config and "num_splits=4" in repr(copy)
        assert copy.schema.names == ["id", "x", "text"]


class Paced:
    """A transform that takes its time for each row, or only the first time, and notes how many rows it was given."""

    def __init__(self, row_s: float, first_s: float = 0.0) -> None:
        self.row_s, self.first_s = row_s, first_s
        self.rows: list[int] = []

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(self.row_s * batch.num_rows + (0 if self.rows else self.first_s))
        self.rows.append(batch.num_rows)
        return batch


PACED: dict[str, Paced] = {}


def paced(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The transform of the test that runs: what is pickled with a stream is another object."""
    return PACED["now"](batch)


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_the_first_block_of_rows_that_take_long_is_small(tables: Tables, on_error: Any) -> None:
    PACED["now"] = transform = Paced(row_s=0.02)
    with tables.stream(400, transform=paced, on_transform_error=on_error).open() as shard:
        next(iter(shard.iter_batches(prefetch_batches=0)))
    assert max(transform.rows) * transform.row_s <= LONGEST_TRANSFORM_S  # of all 400 it would take 8 s
    assert max(transform.rows) >= 40


def test_a_first_call_that_takes_long_makes_no_block_small(tables: Tables) -> None:
    PACED["now"] = transform = Paced(row_s=0.0, first_s=0.5)
    with tables.stream(400, transform=paced).open() as shard:
        next(iter(shard.iter_batches(prefetch_batches=0)))
    assert max(transform.rows) == 400
