"""Rows that fail: which are left out, that all replicas end alike, and that every resume is exact."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream import LanceStream, PrefetchConfig, ReplaceRow, StateError, TransformError
from ray_lance_stream.testing import GlobalBatch, check_resume_at_every_step, global_batches

pytestmark = pytest.mark.thorough

ROWS, SPLITS = 50, 4  # splits of 12 rows


def fail_on(bad: frozenset[int], batch: pa.RecordBatch) -> dict[str, Any]:
    """Fails if any row is bad, so that only trying smaller parts tells which."""
    ids = batch["id"].to_pylist()
    if found := bad & set(ids):
        raise ValueError(f"bad rows {sorted(found)}")
    return {"id": batch["id"], "double": 2 * np.array(ids)}


def skipping(tables: Tables, bad: set[int], **options: Any) -> LanceStream:
    transform = functools.partial(fail_on, frozenset(bad))
    chosen: dict[str, Any] = {"on_transform_error": "skip", "transform": transform} | options
    return tables.stream(ROWS, **chosen)


def expected_ids(bad: set[int], plan: list[list[int]], per_step: int) -> list[list[int]]:
    """The ids of every step, from the rows of every split, by the words of the design."""
    survivors = [[row for row in split if row not in bad] for split in plan]
    cycles = list(zip(*survivors, strict=False))
    return [list(itertools.chain(*cycles[i : i + per_step])) for i in range(0, len(cycles), per_step)]


def ids_of(batches: list[GlobalBatch]) -> list[list[int]]:
    return [batch.columns["id"].tolist() for batch in batches]


def splits_of(tables: Tables, **options: Any) -> list[list[int]]:
    """The rows of every split of epoch 0, from a stream that skips nothing."""
    batches = global_batches(tables.stream(ROWS, **options))
    rows = np.concatenate([batch.columns["id"] for batch in batches])
    return rows.reshape(-1, SPLITS).T.tolist()


@settings(max_examples=15, deadline=None)
@given(bad=st.sets(st.integers(0, ROWS - 1), max_size=25), world_size=st.integers(1, SPLITS))
def test_survivors_come_in_canonical_order_at_any_size(tables: Tables, bad: set[int], world_size: int) -> None:
    expected = expected_ids(bad, splits_of(tables), per_step=2)
    stream = skipping(tables, bad)
    if not expected or bad >= {row for split in splits_of(tables) for row in split}:
        return
    assert ids_of(global_batches(stream, world_size)) == expected


@pytest.mark.parametrize("bad", [{3, 4, 5, 17, 40}, {0, 12, 24, 36}, set(range(12)) - {5}, set()])
def test_a_resume_is_exact_after_every_step_at_every_size(tables: Tables, bad: set[int]) -> None:
    batches = check_resume_at_every_step(skipping(tables, bad, shuffle=False), (1, 3, 4))
    assert {batch.epoch for batch in batches} == {0, 1}


def test_one_bad_split_ends_the_epoch_of_all_and_what_is_left_is_counted(tables: Tables) -> None:
    bad = set(range(12)) - {2, 7, 9}  # split 0 without shuffling; three survivors
    stream = skipping(tables, bad, shuffle=False)
    batches = global_batches(stream, world_size=4)
    assert ids_of(batches) == [[2, 12, 24, 36, 7, 13, 25, 37], [9, 14, 26, 38]]
    assert [batch.step for batch in batches] == [1, 2]
    assert batches[-1].state["positions_consumed_per_split"] == [10, 3, 3, 3]
    with stream.open() as shard:
        assert sum(len(batch["id"]) for batch in shard.iter_batches()) == 12
        assert shard.stats().rows_skipped == len(bad)
        assert sorted(row.row_number for row in shard.skipped) == sorted(bad)
        assert all("bad rows" in row.reason and row.split == 0 for row in shard.skipped)


def test_drop_last_leaves_out_a_step_that_skipped_rows_made_short(tables: Tables) -> None:
    stream = skipping(tables, set(range(12)) - {2, 7, 9}, shuffle=False, drop_last=True)
    assert ids_of(global_batches(stream, 3)) == [[2, 12, 24, 36, 7, 13, 25, 37]]


def test_iterating_after_a_break_at_the_last_step_gives_the_next_epoch(tables: Tables) -> None:
    for bad in ({1}, {1, 2}, set(range(12)) - {2, 7, 9}):
        stream = skipping(tables, bad, shuffle=False)
        steps = len(global_batches(stream))
        with stream.open() as shard:
            for _ in itertools.islice(shard.iter_batches(), steps):
                pass
            assert shard.epoch == 0
            first = next(iter(shard.iter_batches()))
            assert shard.epoch == 1
            assert shard.step == 1
            assert len(first["id"]) > 0


def test_micro_batches_are_equally_many_on_all_replicas(tables: Tables) -> None:
    stream = skipping(tables, {0, 1, 13, 30}, global_batch_size=16)
    whole = global_batches(stream)
    cut = global_batches(stream, 3, micro_batch_size=4)
    assert ids_of(cut) == ids_of(whole)
    assert max(batch.micro_batches for batch in cut) == 2


def test_a_replaced_row_keeps_its_place(tables: Tables) -> None:
    replace = ReplaceRow({"id": -1, "double": 0})
    plain = ids_of(global_batches(tables.stream(ROWS)))
    stream = skipping(tables, {3, 4, 21}, on_transform_error=replace)
    found = ids_of(global_batches(stream, 3))
    assert found == [[-1 if i in (3, 4, 21) else i for i in step] for step in plain]
    check_resume_at_every_step(stream, (1, 3))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"id": -1}, r"lacks the column 'double'"),
        ({"id": -1, "double": 0, "more": 1}, r"adds the column 'more'"),
        ({"id": "x", "double": 0}, r"Column 'id' does not fit.*string is no int64"),
        ({"id": 1.5, "double": 0}, r"Column 'id' does not fit"),
        ({"id": object, "double": 0}, r"cannot be stored"),
        (None, r"lacks the column"),
        ([9, 9], r"lacks the column"),
    ],
    ids=str,
)
def test_a_row_that_cannot_replace_others_is_named_at_once(tables: Tables, value: Any, said: str) -> None:
    """Before the first row fails; and where the first ones do, those that come through say what is wanted."""
    for bad in (set(), set(range(20))):
        with (
            pytest.raises(TransformError, match=rf"ReplaceRow\(.*{said}.*id \(int64\), double \(int64\)") as info,
            skipping(tables, bad, on_transform_error=ReplaceRow(value)).open() as shard,
        ):
            next(iter(shard.iter_batches()))
        assert "return the same columns" not in str(info.value)


def test_a_function_decides_which_errors_are_skipped(tables: Tables) -> None:
    def only_three(error: Exception) -> bool:
        return (isinstance(error, ValueError) and "[3]" in str(error)) or "[3, 4]" in str(error)

    stream = skipping(tables, {3}, on_transform_error=only_three, shuffle=False)
    assert 3 not in itertools.chain(*ids_of(global_batches(stream)))
    with pytest.raises(TransformError, match=r"bad rows \[4"):
        global_batches(skipping(tables, {3, 4}, on_transform_error=only_three, shuffle=False))


def test_warn_says_how_many_and_why(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    global_batches(skipping(tables, {3}, on_transform_error="warn"))
    assert "skipped 1 of" in caplog.text
    assert "bad rows [3]" in caplog.text


def test_when_the_first_rows_all_fail_the_schema_comes_from_later_ones(tables: Tables) -> None:
    found = ids_of(global_batches(skipping(tables, set(range(4)) | set(range(12, 16)), shuffle=False)))
    assert found[0][:4] == [4, 16, 24, 36]
    with pytest.raises(TransformError, match="each of the first"):
        global_batches(skipping(tables, set(range(ROWS))))


def test_a_state_with_skips_is_refused_by_a_stream_that_does_not_skip(tables: Tables) -> None:
    state = global_batches(skipping(tables, {3, 4}, shuffle=False), stop_after=3)[-1].state
    assert state["positions_consumed_per_split"] != state["samples_consumed_per_split"]
    with tables.stream(ROWS, shuffle=False).open() as shard, pytest.raises(StateError, match="on_transform_error"):
        shard.load_state_dict(state)


def test_without_a_transform_all_rows_come_as_from_a_stream_that_skips_none(tables: Tables) -> None:
    """What would be left out are rows that kill who reads them. A state of a stream that skips none goes on."""
    stream = skipping(tables, set(), transform=None)
    expected = global_batches(tables.stream(ROWS))
    assert ids_of(check_resume_at_every_step(stream, (1, 3))[: len(expected)]) == ids_of(expected)
    state = expected[2].state
    with stream.open() as shard:
        shard.load_state_dict(state)
        assert [batch["id"].tolist() for batch in shard.iter_batches()] == ids_of(expected)[3:]


def test_memory_stays_bounded_when_one_split_is_bad(tables: Tables) -> None:
    """A split that yields little is asked for alone: the others' rows do not pile up."""
    rows, bad = 40_000, frozenset(i for i in range(10_000) if i % 10)
    budget = 256 * 1024
    stream = tables.stream(
        rows,
        global_batch_size=400,
        shuffle=False,
        on_transform_error="skip",
        transform=functools.partial(fail_on, bad),
        prefetch=PrefetchConfig(max_buffer_bytes=budget),
    )
    most = 0
    with stream.open() as shard:
        for _ in shard.iter_batches():
            most = max(most, shard.stats().buffered_bytes)
        assert shard.stats().rows == 4 * 1000
    assert most < 2 * budget
