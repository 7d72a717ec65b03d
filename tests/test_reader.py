"""reader.py against a source that counts what is asked of it: order, memory, retries, interruption."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from runs import wait_until

from ray_lance_stream import flight as flight_module
from ray_lance_stream.errors import BlockError, PlacementError, StreamClosedError, TransformError
from ray_lance_stream.plan import OrderSpec, PlanSpec, TableIdentity
from ray_lance_stream.reader import GROWTH, LONGEST_TRANSFORM_S, MOST_OPEN, BlockReader, ReadAhead
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import Whole
from ray_lance_stream.waits import Patience

CYCLES = 40
ROW_BYTES = 100  # of every row of the source below, unless it says otherwise
KIB, MIB = 1024, 1024 * 1024


class Source:
    """Answers at once, later, or with errors; rows weigh what ``row_bytes(cycle)`` says."""

    def __init__(self, row_bytes: Callable[[int], int] = lambda _: ROW_BYTES) -> None:
        self.row_bytes = row_bytes
        self.row_s = 0.0  # how long the transform takes for a row
        self.asked: list[Ranges] = []
        self.futures: list[Future[Whole]] = []
        self.held_back = False  # futures stay open until `answer`
        self.failures: dict[int, list[BaseException]] = {}  # by first cycle, raised one after the other
        self.delays: list[float | None] = []
        self.failed: list[tuple[str, int]] = []
        self.elapsed_s: list[float] = []

    def plan(self, spec: PlanSpec) -> PlanHandle:
        return PlanHandle(
            spec=spec, num_rows=4 * CYCLES, matching_rows=None, schema=pa.schema([]), bytes_per_row=float(ROW_BYTES)
        )

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Whole]:
        del handle
        self.asked.append(ranges)
        self.futures.append(Future())
        if not self.held_back:
            self.answer(-1)
        return self.futures[-1]

    def answer(self, index: int) -> None:
        ranges, future = self.asked[index], self.futures[index]
        failures = self.failures.get(ranges.start)
        if failures:
            future.set_exception(failures.pop(0))
        else:
            future.set_result(self.block(ranges))

    def block(self, ranges: Ranges) -> Whole:
        splits, positions = ranges.places()
        weights = np.array([self.row_bytes(int(position)) - 20 for position in positions])
        ends = np.concatenate([[0], np.cumsum(weights)])
        pad = pa.Array.from_buffers(
            pa.binary(), len(splits), [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(bytes(ends[-1]))]
        )
        table = pa.table({"split": splits, "position": positions, "pad": pad})
        return Whole(table, len(splits) * self.row_s)

    def size(self, ranges: Ranges) -> int:
        return self.block(ranges).nbytes

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        self.elapsed_s.append(elapsed_s)
        self.failed.append((str(error), attempt))
        return self.delays.pop(0) if self.delays else None

    def advice(self, error: BaseException) -> str:
        return f"mind the {type(error).__name__}"

    def close(self) -> None:
        pass


def make_reader(source: Source, *, splits: range = range(4), start: int = 0, q: int = 1, **ahead: int) -> BlockReader:
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=4), epoch=0)
    sizes = {"max_bytes": 100 * MIB, "block_bytes": 2000} | ahead
    return BlockReader(
        source,
        source.plan(spec),
        splits,
        start_cycle=start,
        end_cycle=CYCLES,
        cycles_per_step=q,
        read_ahead=ReadAhead(**sizes),
    )


def places(parts: list[pa.Table]) -> list[tuple[int, int]]:
    table = pa.concat_tables(parts)
    positions, splits = table["position"].to_numpy().tolist(), table["split"].to_numpy().tolist()
    return list(zip(positions, splits, strict=True))


def in_thread(read: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts ``read`` on a thread; its result or error lands in the list."""
    out: list[Any] = []

    def work() -> None:
        try:
            out.append(read())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, out


def wait_until_asked(source: Source, times: int) -> None:
    wait_until(lambda: len(source.asked) >= times, 5, f"{times} requests")


# --- order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 300, 1000, 5000, MIB])
@pytest.mark.parametrize("splits", [range(4), range(1, 3), range(3, 4)])
def test_rows_come_in_canonical_order_whatever_the_blocks(block_bytes: int, splits: range) -> None:
    reader = make_reader(Source(), splits=splits, block_bytes=block_bytes, max_bytes=3 * block_bytes)
    width, row, seen = len(splits), 0, []
    for count in [1, 2, 3, 5, 8, 13] * CYCLES:
        stop = min(row + count, CYCLES * width)
        parts = reader.read(range(row, stop))
        assert sum(part.num_rows for part in parts) == stop - row
        seen += places(parts) if parts else []
        row = stop
        reader.release(row // width)
    assert seen == [(cycle, split) for cycle in range(CYCLES) for split in splits]


def test_reading_begins_in_the_middle_and_asks_for_nothing_before_or_twice() -> None:
    source = Source()
    reader = make_reader(source, start=33, q=4)
    rows = places(reader.read(range(33 * 4, CYCLES * 4)))
    assert rows == [(cycle, split) for cycle in range(33, CYCLES) for split in range(4)]
    assert [ranges.start for ranges in source.asked] == [33, *[r.stop for r in source.asked[:-1]]]
    assert source.asked[-1].stop == CYCLES


def test_rows_that_were_not_released_can_be_read_again_without_new_requests() -> None:
    source = Source()
    reader = make_reader(source)
    first = places(reader.read(range(CYCLES * 4)))
    asked = len(source.asked)
    reader.release(0)
    assert places(reader.read(range(CYCLES * 4))) == first
    assert len(source.asked) == asked
    reader.release(CYCLES)
    with pytest.raises(BlockError, match="rows 0 to 4 are not in the blocks"):
        reader.read(range(4))


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("max_bytes", [1, 1500, 10_000, MIB])
@pytest.mark.parametrize("held_back", [True, False])
def test_what_is_asked_for_and_not_released_stays_within_the_budget(q: int, max_bytes: int, held_back: bool) -> None:
    source = Source()
    source.held_back = held_back
    reader = make_reader(source, q=q, max_bytes=max_bytes, block_bytes=2000)
    step, most = 4 * q * ROW_BYTES, 0
    for cycle in range(0, CYCLES, q):
        stop = min(cycle + q, CYCLES)
        for index, future in enumerate(source.futures):
            if not future.done():
                source.answer(index)
        source.held_back = False  # what the read itself asks for must be there
        reader.read(range(cycle * 4, stop * 4))
        source.held_back = held_back
        # A step must be there, and blocks do not become smaller than 2000 bytes.
        # Counted here, from the requests, and not by the reader's own books.
        held = sum(source.size(ranges) for ranges in source.asked if ranges.stop > cycle)
        most = max(most, held)
        most_allowed = max(max_bytes, max(step, 2000) + 200)  # 200: Arrow's last offsets
        assert held <= most_allowed, f"{held} bytes at cycle {cycle}"
        reader.release(stop)
    assert reader.buffered_bytes == 0
    if max_bytes == 10_000:
        assert most > max_bytes / 2  # it does read ahead


def test_blocks_and_read_ahead_shrink_where_rows_are_heavy_and_recover() -> None:
    source = Source(lambda cycle: 4000 if 20 <= cycle < 30 else ROW_BYTES)
    max_bytes, known = 4800, 0
    reader = make_reader(source, max_bytes=max_bytes, block_bytes=1600)  # four light cycles
    for cycle in range(CYCLES):
        reader.read(range(cycle * 4, cycle * 4 + 4))
        held = [source.size(ranges) for ranges in source.asked if ranges.stop > cycle]
        if any(ranges.start >= 20 for ranges in source.asked):
            known = known or len(source.asked)  # up to here requests were made in ignorance
            assert len(source.asked) <= known or sum(held[:-1]) <= max(max_bytes, held[0])
        reader.release(cycle + 1)
    cycles = {ranges.start: ranges.stop - ranges.start for ranges in source.asked}
    assert [cycles[start] for start in (16, 20)] == [4, 4]
    assert all(cycles[start] == 1 for start in range(24, 31))
    assert max(size for start, size in cycles.items() if start > 31) > 1, "the expectation falls again, in steps"


def test_what_turns_out_too_heavy_is_given_up_while_nobody_reads() -> None:
    """The consumer sleeps: blocks arrive, and tell what those that were not begun will weigh."""
    source = Source(lambda cycle: ROW_BYTES if cycle < 4 else 20 * ROW_BYTES)
    reader = make_reader(source, max_bytes=16_000, block_bytes=1600)
    source.held_back = False
    reader.read(range(4))
    source.held_back = True
    reader.release(1)
    open_blocks = [index for index, future in enumerate(source.futures) if not future.done()]
    assert len(open_blocks) >= 4
    first, second = open_blocks[:2]
    for index in (first, second):
        source.futures[index].set_running_or_notify_cancel()  # being built
    source.answer(first)
    assert [index for index in open_blocks if source.futures[index].cancelled()] == open_blocks[2:]
    source.answer(second)
    assert reader.buffered_bytes < 2 * source.size(source.asked[second]) + 16_000
    source.held_back = False
    assert places(reader.read(range(4, 4 * CYCLES))) == [(p, s) for p in range(1, CYCLES) for s in range(4)]


def test_a_block_is_gone_when_it_is_released() -> None:
    """Without waiting for the garbage collector."""
    source = Source()
    reader = make_reader(source)
    table = reader._wait(reader._blocks[0]) if reader.read(range(4)) else None
    gone = weakref.ref(table) if table is not None else lambda: True
    del table
    source.futures.clear()
    gc.disable()
    try:
        reader.release(CYCLES)
        assert gone() is None
    finally:
        gc.enable()


def test_blocks_begin_small_grow_and_end_where_steps_end() -> None:
    row_bytes, q, block_bytes = 40 * KIB, 2, 3 * MIB
    source = Source(lambda _: row_bytes)
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=4), epoch=0)
    handle = PlanHandle(
        spec=spec, num_rows=1000, matching_rows=None, schema=pa.schema([]), bytes_per_row=float(row_bytes)
    )
    ahead = ReadAhead(max_bytes=4 * block_bytes, block_bytes=block_bytes)
    reader = BlockReader(source, handle, range(4), start_cycle=0, end_cycle=120, cycles_per_step=q, read_ahead=ahead)
    for cycle in range(0, 120, q):
        for _ in range(3):  # reading twice, or asking for what does not fit yet, must not make blocks grow
            reader.read(range(cycle * 4, (cycle + q) * 4))
        reader.release(cycle + q)
    sizes = [(ranges.stop - ranges.start) * 4 * row_bytes for ranges in source.asked]
    assert sizes[0] <= 512 * KIB
    assert all(b <= GROWTH * a + q * 4 * row_bytes for a, b in itertools.pairwise(sizes)), sizes
    assert max(sizes) <= block_bytes < max(sizes) + q * 4 * row_bytes
    assert all(ranges.stop % q == 0 for ranges in source.asked)


@pytest.mark.parametrize(
    ("row_bytes", "step_rows", "rows"),
    [(1, 8, 512), (100, 8, 512), (10_000, 8, 8), (1, 4000, 4000), (100, 4000, 4000), (10_000, 4000, 52)],
)
def test_the_first_block_is_small_in_rows_and_in_bytes_or_is_one_step(
    row_bytes: int, step_rows: int, rows: int
) -> None:
    source = Source()
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=4), epoch=0)
    handle = dataclasses.replace(source.plan(spec), bytes_per_row=float(row_bytes))
    ahead, q = ReadAhead(max_bytes=100 * MIB, block_bytes=32 * MIB), step_rows // 4
    BlockReader(source, handle, range(4), start_cycle=0, end_cycle=100_000, cycles_per_step=q, read_ahead=ahead).ask(
        range(4)
    )
    assert [ranges.num_rows for ranges in source.asked] == [rows]


@pytest.mark.parametrize("row_s", [0.0, 1e-6, 0.1, 10.0])
def test_blocks_of_rows_that_take_long_stay_small(row_s: float) -> None:
    source = Source()
    source.row_s = row_s
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=4), epoch=0)
    ahead = ReadAhead(max_bytes=100 * MIB, block_bytes=MIB)
    reader = BlockReader(
        source, source.plan(spec), range(4), start_cycle=0, end_cycle=5000, cycles_per_step=2, read_ahead=ahead
    )
    reader.read(range(8))
    source.held_back = True
    reader.release(0)
    rows = [ranges.num_rows for ranges in source.asked]
    assert rows[1] * row_s <= LONGEST_TRANSFORM_S or rows[1] == 4  # one row of each split
    assert sum(rows) == 20_000 or len(rows) == MOST_OPEN + 1  # as far ahead as ever, but not in countless requests
    source.held_back, source.row_s = False, 0.0  # such were the first rows alone
    for index in range(1, len(rows)):
        source.answer(index)
    for cycle in range(0, 5000, 2):
        reader.read(range(cycle * 4, cycle * 4 + 8))
        reader.release(cycle + 2)
    assert sum(ranges.num_rows for ranges in source.asked) == 20_000


@pytest.mark.parametrize(("row_bytes", "block_bytes", "blocks"), [(1000, 64 * MIB, 1), (100_000, MIB, 5)])
def test_a_budget_smaller_than_a_step_does_not_split_it_into_tiny_blocks(
    row_bytes: int, block_bytes: int, blocks: int
) -> None:
    source = Source(lambda _: row_bytes)
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=4), epoch=0)
    handle = dataclasses.replace(source.plan(spec), bytes_per_row=float(row_bytes))
    ahead = ReadAhead(max_bytes=1, block_bytes=block_bytes)
    reader = BlockReader(source, handle, range(4), start_cycle=0, end_cycle=30, cycles_per_step=10, read_ahead=ahead)
    for step in range(3):
        asked = len(source.asked)
        reader.read(range(step * 40, step * 40 + 40))
        reader.release(step * 10 + 10)
    assert len(source.asked) - asked <= blocks


# --- errors ------------------------------------------------------------------------------------------------


def test_a_lost_block_is_asked_for_again_and_the_order_stays() -> None:
    source = Source()
    source.failures = {0: [ConnectionError("one")], 5: [ConnectionError("two"), ConnectionError("three")]}
    source.delays = [0.01, 0.01, 0.01]
    reader = make_reader(source, block_bytes=2000)
    assert places(reader.read(range(CYCLES * 4))) == [(c, s) for c in range(CYCLES) for s in range(4)]
    assert reader.retries == 3
    assert sorted(source.failed) == [("one", 1), ("three", 2), ("two", 1)]
    assert [(r.start, r.stop) for r in source.asked].count((5, 10)) == 3


def test_a_retry_waits_as_long_as_the_source_says() -> None:
    source = Source()
    source.failures, source.delays = {0: [ConnectionError("one")]}, [0.3]
    reader = make_reader(source)
    began = time.monotonic()
    reader.read(range(4))
    assert 0.3 <= time.monotonic() - began < 3


def test_the_time_of_failing_counts_from_the_first_failure_until_it_is_final() -> None:
    source = Source()
    source.held_back = True
    source.failures, source.delays = {0: [OSError(str(i)) for i in range(4)]}, [0.1, None, 0.1, None]
    reader = make_reader(source, block_bytes=1)
    reader.release(0)
    time.sleep(0.5)  # the trainer is busy, and so is the source
    source.answer(0)
    source.held_back = False
    for _ in range(2):
        with pytest.raises(BlockError):
            reader.read(range(4))
    assert source.elapsed_s[0] == source.elapsed_s[2] == 0
    assert all(0.1 <= elapsed_s < 0.4 for elapsed_s in source.elapsed_s[1::2])


def test_what_was_given_up_while_nobody_waited_for_it_is_tried_when_somebody_does() -> None:
    class Storage(Source):
        def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
            del elapsed_s
            return 0.02 if isinstance(error, OSError) and attempt < 2 else None

    source = Storage()
    source.failures = {start: [OSError("gone"), OSError("gone")] for start in (0, 5, 10)}
    source.failures[15] = [ValueError("bad")]
    source.held_back = True
    reader = make_reader(source, block_bytes=2000)
    thread, out = in_thread(lambda: reader.read(range(CYCLES * 4)))
    wait_until_asked(source, CYCLES // 5)
    source.held_back = False
    for index in reversed(range(CYCLES // 5)):  # those behind are given up no later than the one that is waited for
        source.answer(index)
    thread.join(5)
    assert isinstance(out[0], BlockError) and not any(source.failures.values())
    before = len(source.asked)
    with pytest.raises(BlockError, match="bad"):  # which was final at once
        reader.read(range(CYCLES * 4))
    assert [ranges.start for ranges in source.asked[before:]] == [0, 5, 10]
    assert places(reader.read(range(CYCLES * 4))) == [(c, s) for c in range(CYCLES) for s in range(4)]


def test_why_a_source_gives_up_is_told_when_the_block_is_wanted() -> None:
    class Placeless(Source):
        placed = False

        def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
            del error, elapsed_s
            if attempt >= 2 and not self.placed:
                raise PlacementError("no prefetcher could be placed")
            return 0.01

    source = Placeless()
    source.failures = {5: [OSError("lost")] * 2}
    reader = make_reader(source, block_bytes=2000)
    first = [(c, s) for c in range(5) for s in range(4)]
    while source.failures[5]:  # it is asked for ahead, and given up
        assert places(reader.read(range(5 * 4))) == first
    for _ in range(3):
        assert places(reader.read(range(5 * 4))) == first
    source.failures = {5: [OSError("lost")] * 2}
    with pytest.raises(PlacementError, match="could be placed"):
        reader.read(range(5 * 4, 10 * 4))
    source.placed = True
    assert places(reader.read(range(5 * 4, 10 * 4))) == [(c, s) for c in range(5, 10) for s in range(4)]


def test_what_failed_in_a_wait_that_was_interrupted_is_tried_anew_by_the_next() -> None:
    class Storage(Source):
        def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
            del error, elapsed_s
            return 0.02 if attempt < 3 else None

    source = Storage()
    source.held_back = True
    source.failures = {0: [OSError(str(attempt)) for attempt in range(3)]}
    reader = make_reader(source)
    thread, out = in_thread(lambda: reader.read(range(4)))
    for attempt in range(3):
        wait_until_asked(source, attempt + 1)
        if attempt == 2:  # fails for the last time when nobody waits any more
            reader.interrupted.set()
            thread.join(5)
            assert isinstance(out[0], StreamClosedError)
        source.answer(attempt)
    source.held_back = False
    reader.interrupted.clear()
    assert places(reader.read(range(4))) == [(0, s) for s in range(4)]
    assert [ranges.start for ranges in source.asked[:4]] == [0] * 4


def test_a_block_that_is_withdrawn_while_it_is_looked_at_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    source.held_back = True
    reader = make_reader(source)
    looks = iter([True])

    class Withdrawn(Future[Any]):
        def done(self) -> bool:
            if next(looks, False):  # another thread gives it up just before it is looked at
                self.cancel()
                source.held_back = False
            return super().done()

    monkeypatch.setattr(sys.modules[__name__], "Future", Withdrawn)
    assert places(reader.read(range(4))) == [(0, s) for s in range(4)]
    assert len(source.asked) >= 2


def test_a_long_wait_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(flight_module, "Patience", lambda: Patience(first_s=0.1))
    source = Source()
    source.held_back = True
    reader = make_reader(source, splits=range(1, 3), block_bytes=1000)
    thread, out = in_thread(lambda: reader.read(range(2)))
    time.sleep(0.7)
    source.answer(0)
    thread.join(5)
    assert len(out[0]) == 1
    assert 2 <= len(caplog.messages) <= 7
    assert "s for data: positions 0 to 5 of splits 1 to 3, epoch 0; attempt 1" in caplog.text


def test_a_final_error_names_the_block_and_keeps_its_cause() -> None:
    source = Source()
    lost = ConnectionError("storage is gone")
    source.failures, source.delays = {0: [ConnectionError("first"), lost]}, [0.01, None]
    reader = make_reader(source, splits=range(1, 3), block_bytes=1000)
    with pytest.raises(
        BlockError, match=r"positions 0 to 5 of splits 1 to 3 .* in 2 attempt.*storage is gone.*Remedy: mind the"
    ) as caught:
        reader.read(range(2))
    assert caught.value.__cause__ is lost


def test_errors_of_ours_come_through_as_they_are_also_wrapped_by_ray() -> None:
    class RayTaskError(Exception):
        cause = TransformError("row 3 is broken")

    for error in (RayTaskError.cause, RayTaskError()):
        source = Source()
        source.failures = {0: [error]}
        with pytest.raises(TransformError) as caught:
            make_reader(source).read(range(4))
        assert caught.value is RayTaskError.cause


# --- ending from outside -----------------------------------------------------------------------------------


def test_an_interrupted_read_ends_soon_and_can_go_on_later() -> None:
    source = Source()
    source.held_back = True
    reader = make_reader(source)
    thread, out = in_thread(lambda: reader.read(range(4)))
    time.sleep(0.05)
    reader.interrupted.set()
    thread.join(2)
    assert not thread.is_alive() and isinstance(out[0], StreamClosedError)
    reader.interrupted.clear()
    source.answer(0)
    assert places(reader.read(range(4))) == [(0, split) for split in range(4)]
    starts = [ranges.start for ranges in source.asked]
    assert len(set(starts)) == len(starts)  # nothing was asked for twice


def test_interruption_does_not_wait_for_a_retry() -> None:
    source = Source()
    source.failures, source.delays = {0: [ConnectionError("one")]}, [60.0]
    reader = make_reader(source)
    thread, out = in_thread(lambda: reader.read(range(4)))
    time.sleep(0.05)
    reader.interrupted.set()
    thread.join(2)
    assert not thread.is_alive() and isinstance(out[0], StreamClosedError)


def test_close_from_another_thread_ends_a_waiting_read_and_gives_up_the_blocks() -> None:
    source = Source()
    source.held_back = True
    reader = make_reader(source)
    thread, out = in_thread(lambda: reader.read(range(4)))
    time.sleep(0.05)
    reader.close()
    thread.join(2)
    assert not thread.is_alive() and isinstance(out[0], StreamClosedError)
    assert all(future.cancelled() for future in source.futures)
    assert reader.buffered_bytes == 0
    with pytest.raises(StreamClosedError):
        reader.read(range(4))
    with pytest.raises(StreamClosedError):
        reader.release(1)
