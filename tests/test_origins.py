"""Batches that say where their rows come from: what they say is so, whatever the stream, and costs nothing unasked."""

from __future__ import annotations

import functools
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import Tables
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import PACKED, table_of

from ray_lance_stream import ConfigError, LanceStream, PrefetchConfig, ReplaceRow, StreamShard
from ray_lance_stream.agreement import ThreadAgreement
from ray_lance_stream.explaining import rows_of_step
from ray_lance_stream.local import LocalLink, LocalSource
from ray_lance_stream.origins import COLUMNS
from ray_lance_stream.plan import Plan, PlanSpec
from ray_lance_stream.topology import Replica, Seat

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_threads_left")]
ROWS = 50
ROW, SPLIT, POSITION, EPOCH, STEP, INDEX = COLUMNS
STREAMS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "clumps, tiny blocks": {"shuffle_clump_size": 5, "prefetch": PrefetchConfig(block_bytes=1, max_buffer_bytes=1)},
    "filtered": {"filter": "id % 3 != 1"},
    "LanceDB's": {"order": "lancedb"},
    "LanceDB's, filtered": {"order": "lancedb", "filter": "id > 9"},
    "steps left out": {"skip_steps": [(0, 2, 3), (1, 1, 1)]},
    "the user's": {},
}


def make(tables: Tables, name: str) -> LanceStream:
    options = dict(STREAMS[name])
    if name == "the user's":  # rows 0, 7, 14, ... and some of them twice
        found = lancedb.connect(tables.uri(ROWS)).open_table("t").search().select(["id"]).with_row_id(True).to_arrow()
        row_ids = found.sort_by("id")["_rowid"].to_numpy()[7 * np.arange(60) % ROWS]
        options["plan"] = pa.table({"row_id": row_ids, "split_id": np.repeat(np.arange(4, dtype=np.uint64), 15)})
    return tables.stream(ROWS, **options)


@functools.cache
def planned(stream: LanceStream, step: int, epoch: int, world_size: int) -> pa.Table:
    """What ``explain`` says of a step; rank by rank it is the rows of that rank, in the same order."""
    return rows_of_step(stream, step, epoch=epoch, world_size=world_size).places


def check(stream: LanceStream, world_size: int, micro_batch_size: int | None, *, state: Any = None) -> int:
    """Compares two iterations of every replica with the plan, row by row; returns how many rows came."""
    rows = 0
    replicas = [stream.open(rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank, shard in enumerate(replicas):
        with shard:
            if state is not None:
                shard.load_state_dict(state)
            for _ in range(2):
                parts: list[pa.Table] = []
                for batch in shard.iter_batches(with_rows=True, micro_batch_size=micro_batch_size):
                    assert list(batch)[-len(COLUMNS) :] == list(COLUMNS)
                    assert {batch[name].dtype for name in COLUMNS} == {np.dtype(np.int64)}
                    assert batch[ROW].tolist() == batch["id"].tolist(), "an id is a row number in these tables"
                    parts.append(shard.explain(batch))
                    assert shard.explain() == parts[-1]
                    rows += len(batch["id"])
                    if shard.is_step_end:
                        said = pa.concat_tables(parts)
                        assert set(said["step"].to_pylist()) == {shard.step}
                        assert set(said["epoch"].to_pylist()) == {shard.epoch}
                        whole = planned(stream, shard.step, shard.epoch, world_size).to_pylist()
                        mine = [place for place in whole if place["rank"] == rank]
                        assert said.drop_columns(["epoch", "step"]).to_pylist() == mine
                        parts = []
    return rows


@pytest.mark.parametrize("name", STREAMS)
def test_every_batch_says_what_explain_says(tables: Tables, name: str) -> None:
    stream = make(tables, name)
    counted = {check(stream, world_size, micro) for world_size, micro in ((1, None), (3, 3))}
    assert len(counted) == 1 and min(counted) > 0


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_resume_says_the_same(tables: Tables, data: st.DataObject) -> None:
    stream = make(tables, data.draw(st.sampled_from(["shuffled", "filtered", "steps left out"])))
    with stream.open() as shard:
        for _ in zip(range(data.draw(st.integers(1, 3))), shard.iter_batches(), strict=False):
            pass
        state = shard.state_dict()
    assert check(stream, data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 4])), state=state)


def fail_on(bad: frozenset[int], batch: pa.RecordBatch) -> dict[str, Any]:
    if bad & set(batch["id"].to_pylist()):
        raise ValueError("bad")
    return {"id": batch["id"]}


@settings(max_examples=15, deadline=None)
@given(bad=st.sets(st.integers(1, ROWS - 1), max_size=20), world_size=st.integers(1, 4), data=st.data())
def test_rows_that_were_skipped_leave_the_numbers_of_the_others_right(
    tables: Tables, bad: set[int], world_size: int, data: st.DataObject
) -> None:
    replace = data.draw(st.booleans())
    stream = tables.stream(
        ROWS,
        transform=functools.partial(fail_on, frozenset(bad)),
        on_transform_error=ReplaceRow({"id": -1}) if replace else "skip",
        filter="id != 0",
    )
    plan = Plan(PlanSpec(table=stream.config.identity, order=stream.config.order, epoch=0), 49, np.arange(1, ROWS))
    found: dict[int, list[int]] = {}
    agreement = ThreadAgreement(1)
    for rank in range(world_size):
        # Each replica goes on to its own end: what matters here is what it says of its rows.
        with stream.open(rank=rank, world_size=world_size, coordinator=None if rank else agreement.member(0)) as shard:
            owned = Replica(dp_rank=rank, dp_size=world_size).owned_splits(4)
            for batch in shard.iter_batches(with_rows=True, micro_batch_size=4):
                for row, split, position, value in zip(*(batch[n] for n in (ROW, SPLIT, POSITION, "id")), strict=True):
                    assert split in owned and row == plan.rows(split, position)
                    assert value == (-1 if row in bad else row)
                    assert replace or row not in bad
                    found.setdefault(int(split), []).append(int(position))
                assert shard.explain() == shard.explain(batch)
                assert (batch[INDEX] % 4 == batch[SPLIT]).all()
                assert set(shard.explain()["rank"].to_pylist()) == {rank}
    for positions in found.values():
        assert positions == sorted(set(positions))


def test_all_formats_carry_them(tables: Tables) -> None:
    with tables.stream().open() as shard:
        state = shard.state_dict()
        want = next(iter(shard.iter_batches(with_rows=True)))
        explained = shard.explain(want)
        for zero_copy in (False, True):
            for batches in (
                shard.iter_batches(with_rows=True, batch_format="pyarrow", zero_copy=zero_copy),
                shard.iter_batches(with_rows=True, batch_format="pandas"),
                shard.iter_batches(with_rows=True, zero_copy=zero_copy),
                shard.iter_torch_batches(with_rows=True, zero_copy=zero_copy),
                shard.iter_torch_batches(with_rows=True, dtypes=torch.float32),
                shard.iter_torch_batches(with_rows=True, collate_fn=lambda columns: columns),
            ):
                shard.load_state_dict(state)
                batch: Any = next(iter(batches))
                assert all(np.asarray(batch[name]).tolist() == want[name].tolist() for name in COLUMNS)
                assert shard.explain(batch) == explained
        shard.load_state_dict(state)
        batch = next(iter(shard.iter_torch_batches(with_rows=True, dtypes=torch.float32)))
        assert {batch[name].dtype for name in COLUMNS} == {torch.int64} and batch["id"].dtype == torch.float32


def test_ranks_of_one_replica_say_the_same(tables: Tables) -> None:
    stream = tables.stream(ROWS)
    seats = [Seat(replica=Replica(dp_rank=rank // 2, dp_size=2), world_rank=rank, world_size=4) for rank in range(4)]
    said = []
    for seat in seats:
        with StreamShard(stream.config, seat, LocalLink(stream.recipe)) as shard:
            said.append([shard.explain(batch) for batch in shard.iter_batches(with_rows=True)])
            assert {rank for batch in said[-1] for rank in batch["rank"].to_pylist()} == {seat.replica.dp_rank}
    assert said[0] == said[1] != said[2] == said[3]


def test_deleted_rows_shift_the_numbers(tables: Tables) -> None:
    uri, table = tables.own(ROWS)
    table.delete("id % 7 = 2")
    stream = tables.stream(uri=uri)
    version = stream.recipe.table.open(stream.config.identity.version)
    with stream.open() as shard:
        for batch in shard.iter_batches(with_rows=True):
            assert version.take(batch[ROW], ["id"])["id"].to_pylist() == batch["id"].tolist() != batch[ROW].tolist()


def test_nothing_is_built_or_sent_unless_it_is_asked_for(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = LocalSource._build

    def noted(self: LocalSource, handle: Any, ranges: Any) -> Any:
        block = build(self, handle, ranges)
        built.append(block.rows.column_names)
        return block

    monkeypatch.setattr(LocalSource, "_build", noted)
    with tables.stream().open() as shard:
        plain = next(iter(shard.iter_batches()))
        assert built and all(names == ["id", "x", "text"] for names in built) and list(plain) == ["id", "x", "text"]
        assert shard.explain()["row"].to_pylist() == plain["id"].tolist(), "the closed form needs no columns"
        built.clear()
        # What was read ahead without the rows is read again with them, and the other way round.
        second = next(iter(shard.iter_batches(with_rows=True)))
        assert shard.step == 2 and second[ROW].tolist() == second["id"].tolist()
        third = next(iter(shard.iter_batches()))
        assert shard.step == 3 and list(third) == ["id", "x", "text"]
        assert {len(names) for names in built} == {3, 5}


def test_what_cannot_be_told_is_refused(tables: Tables, tmp_path: Any) -> None:
    lancedb.connect(str(tmp_path)).create_table("t", pa.table({"id": range(20), ROW: range(20)}))
    taken = LanceStream(str(tmp_path), "t", num_splits=4, global_batch_size=8)
    with taken.open() as shard:
        assert ROW in next(iter(shard.iter_batches())), "a stream may have such a column where no rows are asked for"
        for iterate in (shard.iter_batches, shard.iter_torch_batches):
            with pytest.raises(ConfigError, match=r"begin with '_stream_'.*_stream_row.*Remedy: leave it out"):
                iterate(with_rows=True)
    with LanceStream(str(tmp_path), "t", num_splits=4, global_batch_size=8, columns=["id"]).open() as shard:
        assert ROW in next(iter(shard.iter_batches(with_rows=True)))
    documents = tmp_path / "documents"
    table_of(documents, [[5] * 9] * 20)
    with LanceStream(str(documents), "t", global_batch_size=4, **PACKED).open() as shard:
        with pytest.raises(ConfigError, match="packed documents"):
            shard.iter_batches(with_rows=True)
        next(iter(shard))
        with pytest.raises(ConfigError, match="packed documents"):
            shard.explain()
    with tables.stream().open() as shard:
        with pytest.raises(ConfigError, match="no batch handed out"):
            shard.explain()
        batch = next(iter(shard.iter_batches()))
        for bad in (batch, 3, [1], {ROW: [1]}):
            with pytest.raises(ConfigError, match="with_rows=True"):
                shard.explain(bad)
    skipping = tables.stream(transform=lambda batch: batch, on_transform_error="skip")
    with skipping.open() as shard:
        next(iter(shard.iter_batches()))
        with pytest.raises(ConfigError, match="may skip rows"):
            shard.explain()
