"""Steps that are left out: which these are, at any size and after any resume, and what a state says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run, saved, state_of
from conftest import Tables
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import PACKED, table_of

from ray_lance_stream import ConfigError, LanceStream, PrefetchConfig, StateError, StateMismatchError, StreamingDataset
from ray_lance_stream.datasource import StreamDatasource
from ray_lance_stream.explaining import rows_of_step
from ray_lance_stream.local import LocalSource
from ray_lance_stream.state import StreamState, merge_state_dicts
from ray_lance_stream.stepskips import Skips, read_skip_steps
from ray_lance_stream.testing import GlobalBatch, check_resume_at_every_step, global_batches

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_threads_left")]
STEPS = 6  # of an epoch of 50 rows
Steps = list[tuple[int, int, int]]


def delivered(batches: list[GlobalBatch]) -> dict[tuple[int, int], list[int]]:
    return {(batch.epoch, batch.step): batch.columns["id"].tolist() for batch in batches}


def without(plain: dict[tuple[int, int], list[int]], skips: Steps) -> dict[tuple[int, int], list[int]]:
    return {
        (epoch, step): ids
        for (epoch, step), ids in plain.items()
        if not any(e == epoch and first <= step <= last for e, first, last in skips)
    }


@st.composite
def skip_lists(draw: st.DrawFn) -> Steps:
    """Ranges of steps of three epochs that do not overlap."""
    left_out = draw(st.sets(st.tuples(st.integers(0, 2), st.integers(1, STEPS)), max_size=12))
    ranges: Steps = []
    for epoch, step in sorted(left_out):
        if ranges and ranges[-1][0] == epoch and ranges[-1][2] == step - 1 and draw(st.booleans()):
            ranges[-1] = (epoch, ranges[-1][1], step)
        else:
            ranges.append((epoch, step, step))
    return draw(st.permutations(ranges))


# --- what is delivered -------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(skips=skip_lists(), world_size=st.integers(1, 4), micro=st.sampled_from([None, 4]), data=st.data())
def test_all_other_steps_come_as_ever_at_any_size(
    tables: Tables, skips: Steps, world_size: int, micro: int | None, data: st.DataObject
) -> None:
    choices: list[dict[str, Any]] = [{}, {"filter": "id % 3 != 1"}, {"drop_last": True, "global_batch_size": 20}]
    options = data.draw(st.sampled_from(choices))
    tiny = PrefetchConfig(block_bytes=1, max_buffer_bytes=1) if data.draw(st.booleans()) else PrefetchConfig()
    plain = delivered(global_batches(tables.stream(50, **options), epoch_count=3))
    steps = max(step for _, step in plain)
    skips = [entry for entry in skips if entry[2] <= steps]
    stream = tables.stream(50, skip_steps=skips, prefetch=tiny, **options)
    found = global_batches(stream, world_size, epoch_count=3, micro_batch_size=micro)
    assert delivered(found) == without(plain, skips)


def test_every_step_resumes_at_any_number_of_replicas(tables: Tables) -> None:
    for skips in ([(0, 2, 3), (1, 1, 1)], [(0, 1, 2), (1, 5, 6)], [(0, 5, 6), (1, 2, 2), (1, 4, 5)]):
        batches = check_resume_at_every_step(tables.stream(50, skip_steps=skips), (1, 3))
        assert not any(e == b.epoch and first <= b.step <= last for b in batches for e, first, last in skips)


@settings(max_examples=20, deadline=None)
@given(skips=skip_lists(), micro=st.sampled_from([None, 3]))
def test_the_numbers_are_right_at_every_batch(tables: Tables, skips: Steps, micro: int | None) -> None:
    with tables.stream(50, skip_steps=skips).open() as shard:
        for epoch in range(3):
            gone = {step for e, first, last in skips if e == epoch for step in range(first, last + 1)}
            rows = sum(8 for step in range(1, STEPS + 1) if step not in gone)
            if len(gone) < STEPS:
                batches = shard.iter_batches(micro_batch_size=micro)
                left = len(batches)
                assert left == (STEPS - len(gone)) * (1 if micro is None else 3)
                for batch in batches:
                    left, rows = left - 1, rows - len(batch["id"])
                    if left:
                        assert len(batches) == left
                        assert (len(shard), shard.epoch) == (STEPS, epoch)
                        assert shard.num_rows + shard.dropped_rows == 50
                        assert shard.num_rows == 8 * (STEPS - len(gone))
                assert left == 0
            else:
                assert list(shard.iter_batches()) == []
                rows = 0
            assert rows == 0


def test_a_loop_left_with_the_last_step_that_comes_goes_on_with_the_next_epoch(tables: Tables) -> None:
    with tables.stream(50, skip_steps=[(0, 5, 6)]).open() as shard:
        for _ in shard.iter_batches():
            if shard.step == 4:
                break
        assert (shard.epoch, len(shard.iter_batches())) == (0, 6)
        next(iter(shard.iter_batches()))
        assert (shard.epoch, shard.step) == (1, 1)


def test_blocks_of_steps_that_are_left_out_are_not_read(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    request = LocalSource.request

    def noted(self: LocalSource, handle: Any, ranges: Any) -> Any:
        assert ranges.num_rows > 0
        asked.update(range(ranges.start, ranges.stop))
        return request(self, handle, ranges)

    monkeypatch.setattr(LocalSource, "request", noted)
    for block_bytes in (1, 1 << 20):
        asked.clear()
        prefetch = PrefetchConfig(block_bytes=block_bytes)
        global_batches(tables.stream(50, skip_steps=[(0, 1, 1), (0, 3, 4), (0, 6, 6)], prefetch=prefetch))
        assert asked == {2, 3, 8, 9}


def test_a_dataset_of_ray_data_leaves_them_out(tables: Tables) -> None:
    from ray import cloudpickle

    stream = tables.stream(50, skip_steps=[(0, 1, 1), (0, 3, 4)])

    def ids(**options: Any) -> list[int]:
        recipe = cloudpickle.dumps(stream.recipe)  # type: ignore[no-untyped-call]
        tasks = StreamDatasource(stream.config, recipe, **options).get_read_tasks(2)
        blocks: list[Any] = [block for task in tasks for block in task()]
        return [i for block in blocks for i in block["id"].to_pylist()]

    plain = delivered(global_batches(tables.stream(50), epoch_count=2))
    for epoch, start in ((0, 0), (0, 1), (0, 3), (0, 5), (1, 0)):
        steps = [s for s in range(start + 1, STEPS + 1) if epoch or s not in (1, 3, 4)]
        assert ids(epoch=epoch, start_step=start) == [i for step in steps for i in plain[epoch, step]]


# --- what a state says of them -----------------------------------------------------------------------------


def state_after(stream: LanceStream, step: int, epoch: int = 0) -> dict[str, Any]:
    batches = global_batches(stream, epoch_count=epoch + 1)
    state = next(batch.state for batch in batches if (batch.epoch, batch.step) == (epoch, step))
    again: dict[str, Any] = json.loads(json.dumps(state))
    return again


def test_a_stream_that_names_none_takes_those_of_the_state(tables: Tables) -> None:
    skips = [(0, 2, 2), (0, 4, 5), (1, 1, 3)]
    first = tables.stream(50, skip_steps=skips)
    state = state_after(first, 3)
    assert state["provenance"]["skipped_cycles"] == [[0, 2, 4], [0, 6, 10], [1, 0, 6]]
    resumed = tables.stream(50, resume_from=state)
    found = delivered(global_batches(resumed, 3, epoch_count=2))
    assert list(found) == [(0, 6), (1, 4), (1, 5), (1, 6)]
    assert state_after(resumed, 6) == state_after(first, 6), "the list lives on"
    assert delivered(global_batches(tables.stream(50, skip_steps=skips, resume_from=state), epoch_count=2)) == found


def test_steps_ahead_of_a_state_may_be_named_or_no_longer(tables: Tables) -> None:
    state = state_after(tables.stream(50), 2, epoch=1)
    spike = tables.stream(50, resume_from=state, skip_steps=[(1, 3, 4), (2, 6, 6)])
    found = delivered(global_batches(spike, epoch_count=2))
    assert list(found) == [(1, 5), (1, 6), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    later = state_after(spike, 5, epoch=1)
    assert later["provenance"]["skipped_cycles"] == [[1, 4, 8], [2, 10, 12]]
    others = tables.stream(50, resume_from=later, skip_steps=[(1, 3, 4), (2, 1, 4)])
    assert list(delivered(global_batches(others, epoch_count=2))) == [(1, 6), (2, 5), (2, 6)]


def test_what_lies_behind_a_state_is_what_happened(tables: Tables) -> None:
    plain, skipped = state_after(tables.stream(50), 4), state_after(tables.stream(50, skip_steps=[(0, 2, 3)]), 4)
    for state, skips, words in (
        (plain, [(0, 3, 5)], "Found: cycles 4 to 7 of epoch 0 delivered"),
        (skipped, [], "Found: cycles 2 to 5 of epoch 0 left out and not named"),
        (skipped, [(0, 3, 3)], "delivered"),
    ):
        with (
            pytest.raises(StateMismatchError, match=words) as error,
            tables.stream(50, resume_from=state, skip_steps=skips).open(),
        ):
            pass
        assert error.value.field == "skip_steps" and "allow_changes=('skip_steps',)" in str(error.value)
    on_purpose = tables.stream(50, resume_from=plain, skip_steps=[(0, 3, 5)], allow_changes=("skip_steps",))
    found = global_batches(on_purpose)
    assert list(delivered(found)) == [(0, 6)]
    assert found[-1].state["provenance"]["skipped_cycles"] == [[0, 8, 10]], "the others were delivered"
    with pytest.raises(StateMismatchError, match="skip_steps"):
        merge_state_dicts([plain, skipped])


def test_another_global_batch_size_cuts_whole_steps_or_says_so(tables: Tables) -> None:
    state = state_after(tables.stream(50, skip_steps=[(0, 3, 4)]), 2)  # cycles 4 to 7
    plain = delivered(global_batches(tables.stream(50, global_batch_size=16)))
    with tables.stream(50, resume_from=state, global_batch_size=16).open() as shard:
        assert [(shard.step, b["id"].tolist()) for b in shard.iter_batches()] == [(3, plain[0, 3])]
    with (
        pytest.raises(ConfigError, match=r"cycles 4 to 7 of epoch 0 in the state.*skip_steps=\[\]"),
        tables.stream(50, resume_from=state, global_batch_size=12).open(),
    ):
        pass
    with tables.stream(50, resume_from=state, global_batch_size=12, skip_steps=[]).open() as shard:
        assert [shard.step for _ in shard.iter_batches()] == [2, 3, 4]


def test_a_state_without_them_is_what_it_ever_was(tables: Tables) -> None:
    assert "skipped_cycles" not in state_after(tables.stream(50), 1)["provenance"]
    assert state_after(tables.stream(50, skip_steps=[]), 1) == state_after(tables.stream(50), 1)


@pytest.mark.parametrize("bad", [3, [[0, 1]], [[0, 4, 2]], [[0, 1, 2], [0, 2, 3]], [[0, -1, 2]], [[0, "1", 2]], None])
def test_a_damaged_list_is_refused(tables: Tables, bad: Any) -> None:
    state = state_after(tables.stream(50), 1)
    state["provenance"]["skipped_cycles"] = bad
    with pytest.raises(StateError, match="skipped_cycles is missing or damaged"):
        StreamState.from_dict(state)


def test_a_dataset_takes_a_state_behind_them_only(tables: Tables) -> None:
    import lancedb

    stream = tables.stream(50, skip_steps=[(0, 2, 3)])
    dataset = StreamingDataset(
        lancedb.connect(tables.uri(50)).open_table("t"), num_splits=4, shuffle_seed=7, allow_changes=("order",)
    )
    with pytest.raises(StateError, match="a dataset knows no steps"):
        dataset.load_state_dict(state_after(stream, 1))
    dataset.load_state_dict(state_after(stream, 4))
    assert dataset.state_dict()["provenance"]["skipped_cycles"] == [[0, 2, 6]]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skips", "words"),
    [
        (3, "Found: 3"),
        ([3], "Found: "),
        ([(1, 2)], r"Found: \(1, 2\).*Expected: a list of \(epoch, first step, last step\)"),
        ([(0, 3, 2)], r"Found: \(0, 3, 2\)"),
        ([(0, 0, 2)], r"Found: \(0, 0, 2\)"),
        ([(-1, 1, 2)], r"Found: \(-1, 1, 2\)"),
        ([(0, 1.0, 2)], r"Found: \(0, 1.0, 2\)"),
        ([(0, 1, True)], r"Found: \(0, 1, True\)"),
        ([(0, 4, 5), (0, 1, 4)], r"Found: \(0, 1, 4\) and \(0, 4, 5\).*do not overlap"),
        ([(0, 2, 2), (0, 2, 2)], "do not overlap"),
        ([(5, 6, 7)], "Found: steps 6 to 7 of epoch 5. Expected: steps 1 to 6"),
    ],
)
def test_bad_lists_are_refused_at_construction(tables: Tables, skips: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"skip_steps is not valid. {words}" if words[0] == "F" else words):
        tables.stream(50, skip_steps=skips)


def test_a_filters_epoch_is_known_when_the_stream_is_opened(tables: Tables) -> None:
    stream = tables.stream(50, filter="id < 24", skip_steps=[(0, 3, 4)])
    with pytest.raises(ConfigError, match=r"steps 3 to 4 of epoch 0. Expected: steps 1 to 3"), stream.open():
        pass


def test_what_cannot_be_exact_is_refused_at_construction(tables: Tables, tmp_path: Path) -> None:

    options: dict[str, Any] = {"transform": lambda batch: batch, "on_transform_error": "skip"}
    with pytest.raises(ConfigError, match="does not go with on_transform_error"):
        tables.stream(50, skip_steps=[(0, 1, 1)], **options)
    tables.stream(50, skip_steps=[], **options)
    state = state_after(tables.stream(50, skip_steps=[(0, 2, 3)]), 1)
    with (
        pytest.raises(ConfigError, match="does not go with on_transform_error"),
        tables.stream(50, resume_from=state, **options).open(),
    ):
        pass
    documents = tmp_path / "documents"
    table_of(documents, [[5] * 9] * 20)
    with pytest.raises(ConfigError, match="does not go with pack_sequences"):
        LanceStream(str(documents), "t", global_batch_size=4, skip_steps=[(0, 1, 1)], **PACKED)


# --- the list itself ---------------------------------------------------------------------------------------


@given(skips=skip_lists(), q=st.integers(1, 5), epoch=st.integers(0, 3), cycle=st.integers(0, 40))
def test_before_and_since_share_the_cycles_out(skips: Steps, q: int, epoch: int, cycle: int) -> None:
    named = read_skip_steps(skips)
    assert named is not None
    whole = Skips.of_steps(named, q)

    def cells(some: Skips) -> set[tuple[int, int]]:
        return {(e, c) for e, start, stop in some.ranges for c in range(start, stop)}

    assert cells(whole) == {
        (e, c) for e, first, last in skips for step in range(first, last + 1) for c in range((step - 1) * q, step * q)
    }
    before, since = whole.before(epoch, cycle), whole.since(epoch, cycle)
    assert cells(before) == {place for place in cells(whole) if place < (epoch, cycle)}
    assert cells(since) == cells(whole) - cells(before)
    assert before | since == whole == Skips.from_json("x", json.loads(json.dumps(whole.to_json())))
    assert {(epoch, c) for gap in whole.in_epoch(epoch) for c in gap} == {p for p in cells(whole) if p[0] == epoch}


# --- the command line --------------------------------------------------------------------------------------


def test_inspect_and_explain_know_them(tables: Tables, tmp_path: Path) -> None:
    skips = [(0, 3, 4), (1, 6, 6)]
    stream = tables.stream(50, skip_steps=skips)
    batch = global_batches(stream)[0]
    place = saved(tmp_path, state_of(batch))
    table = ("--uri", tables.uri(50), "--table", "t")
    assert "  skip_steps  epoch 0, cycles 4 to 7; epoch 1, cycles 10 to 11" in run("inspect", place).stdout.splitlines()
    for options in ((), table):
        shown = run("inspect", place, "--global-batch-size", 8, *options, columns=160).stdout.splitlines()
        assert "  skip_steps  epoch 0, steps 3 to 4; epoch 1, step 6" in shown
    assert "  left        24 rows in 3 steps of this epoch (6 cycles)" in shown
    said = json.loads(run("inspect", place, "--global-batch-size", 8, *table, "--json").stdout)["streams"]["train"]
    assert said["provenance"]["skipped_cycles"] == [[0, 4, 8], [1, 10, 12]]
    assert said["table"]["skip_steps"] == [list(entry) for entry in skips]
    assert (said["table"]["steps_left"], said["table"]["rows_left"]) == (3, 24)
    plain = tables.stream(50)
    for step in range(1, STEPS + 1):
        arguments = ("explain", tables.uri(50), "t", "--step", step, "--checkpoint", place, "--global-batch-size", 8)
        told = json.loads(run(*arguments, "--json").stdout)
        assert told["skipped"] == rows_of_step(stream, step).skipped == (step in (3, 4))
        assert told["rows"] == rows_of_step(plain, step).places.to_pylist()
    assert (
        "(cycles 4 to 5); left out by skip_steps, not delivered"
        in run(
            "explain", tables.uri(50), "t", "--step", 3, "--checkpoint", place, "--global-batch-size", 8, columns=120
        ).stdout
    )
