"""Where a state leads: to the next row, at any number of replicas, on the data it was taken from, or to an error."""

from __future__ import annotations

import datetime
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables, rows_from
from pyarrow import fs as pafs

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    MissingStateError,
    PrefetchConfig,
    StateError,
    StateMismatchError,
    StreamingDataset,
    TableVersionError,
    testing,
)
from ray_lance_stream.checkpoint import FILE_NAME, write_streams
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import GlobalBatch, check_resume_at_every_step, check_transform, global_batches

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_threads_left")]


def ids(batches: list[GlobalBatch]) -> list[list[int]]:
    return [batch.columns["id"].tolist() for batch in batches]


def says_all(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """A message says what is wrong, what was found, what was expected and what to do."""
    text = str(error.value)
    assert all(part in text for part in ("Found: ", "Expected: ", "Remedy: ", *words)), text


def half_an_epoch(stream: LanceStream) -> tuple[dict[str, Any], list[list[int]]]:
    """Returns the state after three steps, and the ids of the steps that follow in the epoch."""
    batches = global_batches(stream)
    return json.loads(json.dumps(batches[2].state)), ids(batches[3:])


# --- the next row, whatever the cluster --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_splits": 6, "global_batch_size": 12, "filter": "id % 3 != 1", "shuffle_clump_size": 5},
        {"num_splits": 5, "global_batch_size": 15, "drop_last": True},
        {"prefetch": PrefetchConfig(block_bytes=1, max_buffer_bytes=1), "shuffle": False},
    ],
    ids=["plain", "filter and clumps", "drop_last", "tiny blocks"],
)
def test_every_step_resumes_at_any_number_of_replicas(tables: Tables, options: dict[str, Any]) -> None:
    stream = tables.stream(50, **options)
    batches = check_resume_at_every_step(stream, (2, 3, 1, 4) if not options else (3, 1), prefetch_batches=2)
    steps = len(batches) // 2
    first, second = batches[:steps], batches[steps:]
    assert {batch.epoch for batch in first} == {0} and {batch.epoch for batch in second} == {1}
    if stream.config.order.shuffle:
        assert ids(first) != ids(second)
    assert [batch.step for batch in second] == list(range(1, steps + 1))


def test_every_step_resumes_when_steps_are_cut_and_rows_are_augmented(tables: Tables) -> None:
    def augment(batch: pa.RecordBatch, ctx: Any) -> dict[str, Any]:
        draws = [generator.normal(size=2) for generator in ctx.generators()]
        return {"id": batch["id"], "noise": np.array(draws), "text": batch["text"]}

    check_transform(augment, rows_from(0, 7))
    stream = tables.stream(50, transform=augment, prefetch=PrefetchConfig(block_bytes=500))
    batches = check_resume_at_every_step(stream, (1, 3), micro_batch_size=2)
    assert {batch.micro_batches for batch in batches} == {4}
    # Other blocks, other micro-batches, another world size, in the middle: the same bits.
    other = tables.stream(50, transform=augment, prefetch=PrefetchConfig(block_bytes=1, max_buffer_bytes=1))
    rest = global_batches(other, 4, state=batches[2].state, prefetch_batches=8)
    assert [a.columns["noise"].tobytes() for a in rest] == [b.columns["noise"].tobytes() for b in batches[3:6]]


def test_a_state_after_the_last_step_has_an_empty_rest_and_then_a_whole_new_epoch(tables: Tables) -> None:
    stream = tables.stream()
    whole = global_batches(stream, 2, epoch_count=3)
    steps = len(whole) // 3
    for end in (steps, 2 * steps):
        state = whole[end - 1].state
        assert state["epoch"] == end // steps - 1
        for world_size in (1, 3):
            assert global_batches(stream, world_size, state=state) == []
            found = global_batches(stream, world_size, state=state, epoch_count=2)
            assert ids(found) == ids(whole[end : end + steps])
    epochs = [ids(whole[start : start + steps]) for start in range(0, 3 * steps, steps)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    with stream.open() as shard:
        shard.load_state_dict(whole[steps - 1].state)
        assert (shard.epoch, shard.step) == (0, steps)  # so that code for the epoch's end runs once
        assert list(shard) == []
        assert (shard.epoch, shard.step) == (1, 0)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_the_state_covers_what_was_handed_over_and_not_what_was_prefetched(
    tables: Tables, prefetch_batches: int
) -> None:
    with tables.stream().open() as shard:
        batches = iter(shard.iter_batches(prefetch_batches=prefetch_batches))
        next(batches)
        next(batches)
        time.sleep(0.05)  # by now all the batches that may be made ahead have been made
        state = shard.state_dict()
        assert state["samples_consumed_per_split"] == state["positions_consumed_per_split"] == [4] * 4
        assert shard.step == 2
        rest = [batch["id"].tolist() for batch in batches]
    assert ids(global_batches(tables.stream(), 3, state=state)) == rest
    assert len(rest) == 4


def test_a_state_taken_with_another_step_size_continues_with_the_next_row(tables: Tables) -> None:
    state, rest = half_an_epoch(tables.stream())  # after 6 of 12 cycles
    found = global_batches(tables.stream(global_batch_size=16), 2, state=state)  # steps of 4: 2 cycles are left of one
    assert [len(batch) for batch in ids(found)] == [8, 16]
    assert np.concatenate(ids(found)).tolist() == np.concatenate(rest).tolist()


# --- the data a state belongs to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("filter", {"filter": "id >= 2"}),
        ("shuffle", {"shuffle": False}),
        ("shuffle_seed", {"shuffle_seed": 8}),
        ("shuffle_clump_size", {"shuffle_clump_size": 2}),
        ("num_splits", {"num_splits": 2}),
    ],
)
def test_a_state_of_other_data_is_refused_by_name_and_may_be_allowed(
    tables: Tables, field: str, options: dict[str, Any]
) -> None:
    state, rest = half_an_epoch(tables.stream())
    saved, current = getattr(tables.stream().config.order, field), getattr(tables.stream(**options).config.order, field)
    with tables.stream(**options).open() as shard:
        next(iter(shard))
        before = shard.state_dict()
        with pytest.raises(StateMismatchError) as error:
            shard.load_state_dict(state)
        says_all(error, field, f"Expected: {saved!r}", f"Found: {current!r}", f"{field}={saved!r}")
        assert (error.value.field, error.value.saved, error.value.current) == (field, saved, current)
        assert shard.state_dict() == before  # and the shard goes on where it was
        next(iter(shard))
    with pytest.raises(StateMismatchError) as error, tables.stream(resume_from=state, **options).open():
        pass
    assert error.value.field == field
    if field == "num_splits":
        assert "allow_changes" not in str(error.value)
        return
    assert f"allow_changes=({field!r},)" in str(error.value)
    with tables.stream(resume_from=state, allow_changes=(field,), **options).open() as shard:
        assert shard.step == 3
        assert [batch["id"].tolist() for batch in shard] != rest
        assert getattr(shard.state().provenance.order, field) == current  # the stream's own value holds from here


def test_a_drawn_seed_gives_way_to_the_states(tables: Tables) -> None:
    state, rest = half_an_epoch(tables.stream(shuffle_seed=None))
    with tables.stream(shuffle_seed=None, resume_from=state).open() as shard:
        assert [batch["id"].tolist() for batch in shard] == rest
        assert shard.state_dict()["shuffle_seed"] == state["shuffle_seed"]
    with pytest.raises(StateMismatchError) as error, tables.stream(shuffle_seed=9, resume_from=state).open():
        pass
    assert error.value.field == "shuffle_seed"


@pytest.mark.parametrize("change", ["append", "delete", "compact", "update", "add column", "delete all"])
def test_a_state_moves_the_stream_to_its_version_whatever_was_written_since(tables: Tables, change: str) -> None:
    uri, table = tables.own(50)
    table.delete("id % 10 = 3")
    state, rest = half_an_epoch(tables.stream(uri=uri))
    if change == "append":
        table.add(rows_from(50, 30))
    elif change == "delete":
        table.delete("id < 20")
    elif change == "compact":
        table.optimize()
    elif change == "update":
        table.update(where="id > 10", values={"text": "changed"})
    elif change == "add column":
        table.add_columns({"twice": "id * 2"})
    elif change == "delete all":
        table.delete("id >= 0")
    assert table.version > state["provenance"]["table_version"]
    with tables.stream(uri=uri, resume_from=state, columns=["id"]).open() as shard:
        assert [batch["id"].tolist() for batch in shard] == rest
        next_epoch = [batch["id"].tolist() for batch in shard]
        assert shard.state_dict()["provenance"] == state["provenance"]  # later epochs stay on the version
    alive = set(range(50)) - {3, 13, 23, 33, 43}
    assert len(np.concatenate(next_epoch)) == 44 and set(np.concatenate(next_epoch)) < alive
    if change != "delete all":
        assert ids(global_batches(tables.stream(uri=uri), 3, state=state, epoch_count=2)) == rest + next_epoch


def test_a_pinned_version_that_is_not_the_states_is_refused(tables: Tables) -> None:
    uri, table = tables.own(50)
    state, rest = half_an_epoch(tables.stream(uri=uri))
    version = table.version
    table.add(rows_from(50, 14))
    with tables.stream(uri=uri, version=version, resume_from=state).open() as shard:
        assert [batch["id"].tolist() for batch in shard] == rest
    pinned = {"uri": uri, "version": table.version, "resume_from": state}
    with pytest.raises(StateMismatchError) as error, tables.stream(**pinned).open():
        pass
    says_all(error, f"version={table.version}", f"Expected: {version}", "allow_changes=('table',)")
    assert error.value.field == "table"
    with tables.stream(allow_changes=("table",), **pinned).open() as shard:
        assert shard.num_rows == 64 and shard.step == 3


def test_a_version_that_was_cleaned_up_is_refused_before_the_first_step(tables: Tables) -> None:
    uri, table = tables.own(50)
    state, _ = half_an_epoch(tables.stream(uri=uri))
    table.delete("id = 3")
    table.optimize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table.cleanup_old_versions(datetime.timedelta(0), delete_unverified=True)
    version = state["provenance"]["table_version"]
    with pytest.raises(TableVersionError, match=f"version {version}") as error:
        tables.stream(uri=uri, resume_from=state)
    says_all(error)
    with tables.stream(uri=uri).open() as shard, pytest.raises(TableVersionError, match=f"version {version}"):
        shard.load_state_dict(state)


def test_a_copied_or_moved_table_is_the_same_table(tables: Tables, tmp_path: Path) -> None:
    uri, _ = tables.own(50)
    state, rest = half_an_epoch(tables.stream(uri=uri))
    shutil.copytree(uri, tmp_path / "copy")
    shutil.move(uri, tmp_path / "moved")
    for path in (tmp_path / "copy", tmp_path / "moved"):
        assert ids(global_batches(tables.stream(uri=str(path)), 2, state=state)) == rest


def test_a_table_that_was_dropped_and_created_anew_is_another_table(tables: Tables) -> None:
    uri, _ = tables.own(50)
    state, _ = half_an_epoch(tables.stream(uri=uri))
    database = lancedb.connect(uri)
    database.drop_table("t")
    anew = database.create_table("t", rows_from(0, 25))
    anew.add(rows_from(25, 25))
    assert anew.version == state["provenance"]["table_version"]
    with pytest.raises(StateMismatchError) as error, tables.stream(uri=uri, resume_from=state).open():
        pass
    says_all(error, "dropped and created anew")
    assert error.value.field == "table"
    with tables.stream(uri=uri, resume_from=state, allow_changes=("table",)).open() as shard:
        assert shard.step == 3


# --- resume_from -------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, state: dict[str, Any], name: str = "train", **options: Any) -> Path:
    directory.mkdir()
    write_streams(pafs.LocalFileSystem(), str(directory), {name: StreamState.from_dict(state)}, **options)
    return directory


def test_resume_from_takes_a_state_a_directory_a_file_or_a_uri(tables: Tables, tmp_path: Path) -> None:
    state, rest = half_an_epoch(tables.stream())
    path = write_checkpoint(tmp_path / "checkpoint", state)
    for source in (state, path, str(path), f"file://{path}", path / FILE_NAME):
        assert ids(global_batches(tables.stream(resume_from=source), 3)) == rest


def test_the_harness_says_what_it_wants(tables: Tables) -> None:
    assert {"check_transform", "check_resume_at_every_step", "global_batches"} <= set(testing.__all__)
    assert all(hasattr(testing, name) for name in testing.__all__)
    table = lancedb.connect(tables.uri(24)).open_table("t")
    dataset: Any = StreamingDataset(table, num_splits=4)
    for check in (check_resume_at_every_step, global_batches):
        with pytest.raises(ConfigError, match=r"type StreamingDataset.*Expected: a LanceStream.*order='lancedb'"):
            check(dataset)


def trains_on_all(shard: Any) -> Iterator[dict[str, Any]]:
    parts: list[Any] = []
    for batch in shard.iter_batches(micro_batch_size=2):
        parts.append(batch["id"])
        if shard.is_step_end:
            yield {"id": np.concatenate(parts)}
            parts.clear()


def fetches_ahead(shard: Any) -> Iterator[dict[str, Any]]:
    """As Accelerate does, to know which batch is the last."""
    before = None
    for batch in shard.iter_batches():
        if before is not None:
            yield before
        before = {"id": batch["id"]}
    if before is not None:
        yield before


def leaves_out_a_step(shard: Any) -> Iterator[dict[str, Any]]:
    for batch in shard.iter_batches():
        if shard.step != 2:
            yield {"id": batch["id"]}


def begins_anew(shard: Any) -> Iterator[dict[str, Any]]:
    """Counts its steps from where the epoch begins."""
    for step, batch in enumerate(shard.iter_batches()):
        yield {"id": batch["id"], "step": np.full(len(batch["id"]), step)}


def test_a_loop_is_checked_wherever_it_is_taken_up_again(tables: Tables) -> None:
    stream = tables.stream(50, drop_last=False)
    testing.check_loop(trains_on_all, stream, (1, 3))
    with pytest.raises(AssertionError, match=r"from step 0 on.*: step 1 of epoch 0: the state is not that"):
        testing.check_loop(fetches_ahead, stream, (1, 3))
    with pytest.raises(AssertionError, match="step 2 of epoch 0: column 'id' holds other rows"):
        testing.check_loop(leaves_out_a_step, stream, (1, 3))
    with pytest.raises(AssertionError, match="the loop has ended on 1 replicas"):
        testing.check_loop(lambda _: iter(()), stream, (1,))
    with pytest.raises(AssertionError, match="'step' is no column of the stream"):
        testing.check_loop(begins_anew, stream, (1,))
    skipping = tables.stream(50, transform=fail_on_sevenths, on_transform_error="skip")
    testing.check_loop(trains_on_all, skipping, (3, 1))


def fail_on_sevenths(batch: Any) -> Any:
    if any(row % 7 == 0 for row in batch["id"].to_pylist()):
        raise ValueError("a bad row")
    return {"id": batch["id"]}


def test_resume_from_is_where_the_stream_begins_for_the_harness_too(tables: Tables) -> None:
    state, rest = half_an_epoch(tables.stream())
    batches = check_resume_at_every_step(tables.stream(resume_from=state), (1, 2))
    assert ids(batches[: len(rest)]) == rest
    assert batches[len(rest)].epoch == 1


def test_the_ranks_files_of_a_run_without_manager_are_merged(tables: Tables, tmp_path: Path) -> None:
    state, rest = half_an_epoch(tables.stream())
    directory = write_checkpoint(tmp_path / "checkpoint", state, rank=0)
    write_streams(pafs.LocalFileSystem(), str(directory), {"train": StreamState.from_dict(state)}, rank=1)
    assert ids(global_batches(tables.stream(resume_from=directory), 2)) == rest


def test_a_checkpoint_without_state_is_an_error_or_a_restart_on_request(tables: Tables, tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(MissingStateError) as error:
        tables.stream(resume_from=tmp_path)
    says_all(error, str(tmp_path), FILE_NAME, "on_missing_state='restart'")
    stream = tables.stream(resume_from=tmp_path, on_missing_state="restart")
    assert ids(global_batches(stream)) == ids(global_batches(tables.stream()))

    state, _ = half_an_epoch(tables.stream())
    other = write_checkpoint(tmp_path / "checkpoint", state, name="validation")
    with pytest.raises(MissingStateError) as error, tables.stream(resume_from=other).open():
        pass
    says_all(error, "'train'", "validation")
    with tables.stream(resume_from=other).open(name="validation") as shard:
        assert shard.step == 3
    with tables.stream(resume_from=other, on_missing_state="restart").open() as shard:
        assert shard.step == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind": "x"}', b"\xff\xfe"])
def test_a_damaged_checkpoint_is_refused_at_construction(tables: Tables, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StateError) as error:
        tables.stream(resume_from=tmp_path)
    says_all(error, FILE_NAME)


@pytest.mark.parametrize("source", [3, [1], {}, {"epoch": 0}, object()])
def test_what_is_no_state_is_refused_at_construction(tables: Tables, source: Any) -> None:
    with pytest.raises(StateError) as error:
        tables.stream(resume_from=source)
    says_all(error)


def test_states_from_within_a_cycle_or_beyond_the_end_are_refused(tables: Tables) -> None:
    state, rest = half_an_epoch(tables.stream())
    keys = ("samples_consumed_per_split", "positions_consumed_per_split")
    for counts, word in (([6, 6, 5, 5], "end of a cycle"), ([13] * 4, "beyond the end")):
        with tables.stream().open() as shard:
            next(iter(shard))
            before = shard.state_dict()
            with pytest.raises(StateError, match=word) as error:
                shard.load_state_dict(state | dict.fromkeys(keys, counts))
            says_all(error)
            assert shard.state_dict() == before
            shard.load_state_dict(state)
            assert [batch["id"].tolist() for batch in shard] == rest


def test_allow_changes_is_checked_when_the_stream_is_built(tables: Tables) -> None:
    with pytest.raises(ConfigError, match="allow_changes") as error:
        tables.stream(allow_changes=("seed",))
    says_all(error, "shuffle_seed")
