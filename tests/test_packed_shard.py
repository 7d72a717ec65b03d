"""Packed streams: the dataset's blocks as global batches at any number of replicas, and states after every step."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import lancedb
import lancedb.streaming
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import DOCUMENTS, PACKED, SPLITS, Block, T, cycles_of, ranks, saved, table_of, taken, with_holes

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    PrefetchConfig,
    ReplaceRow,
    StateError,
    StateMismatchError,
    StreamingDataset,
    TransformError,
    merge_state_dicts,
)
from ray_lance_stream.checkpoint import locate, read_streams, write_streams
from ray_lance_stream.config import StreamConfig
from ray_lance_stream.packstate import PackPlace, SplitCursor
from ray_lance_stream.position import Position
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import GlobalBatch, check_resume_at_every_step, global_batches

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_threads_left")]
STEP = 2 * SPLITS  # blocks; 40 an epoch are 5 steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(database, table) of the documents."""
    path = tmp_path_factory.mktemp("documents")
    return str(path), table_of(path, DOCUMENTS)


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, with documents that are null."""
    path = tmp_path_factory.mktemp("holes")
    return str(path), table_of(path, with_holes())


def stream_of(source: Any, **options: Any) -> LanceStream:
    return LanceStream(source[0], "t", **{"global_batch_size": STEP} | PACKED | options)


def blocks_of(batches: list[GlobalBatch]) -> list[Block]:
    for batch in batches:
        assert list(batch.columns) == ["input_ids", "doc_ids"]
        assert {(array.dtype, array.shape[1:]) for array in batch.columns.values()} == {(np.dtype(np.int64), (T,))}
    return [
        (ids.tolist(), docs.tolist())
        for batch in batches
        for ids, docs in zip(batch.columns["input_ids"], batch.columns["doc_ids"], strict=True)
    ]


# --- the blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "lancedb"},
        {"shuffle": False, "blocks_per_epoch": 20},
        {"blocks_per_epoch": 72, "filter": "id > 7", "shuffle_clump_size": 3},
    ],
    ids=str,
)
def test_blocks_are_the_datasets_at_any_number_of_replicas(whole: Any, options: dict[str, Any]) -> None:
    expected = [cycles_of(ranks(whole[1], **{"order": "feistel", "epoch": e} | options)) for e in range(2)]
    stream = stream_of(whole, **options)
    for world_size in range(1, SPLITS + 1):
        for micro_batch_size in (None, 3):
            found = global_batches(stream, world_size, epoch_count=2, micro_batch_size=micro_batch_size)
            for epoch in range(2):
                assert blocks_of([batch for batch in found if batch.epoch == epoch]) == expected[epoch]


def test_rows_of_the_users_own_choice(whole: Any) -> None:
    row_ids = whole[1].search().select(["id"]).with_row_id(True).to_arrow()["_rowid"].to_numpy()
    chosen = np.random.default_rng(0).permutation(row_ids)[:50]
    plan = pa.table({"row_id": pa.array(chosen, pa.uint64()), "split_id": pa.array(np.arange(50) % SPLITS)})
    (dataset,) = ranks(whole[1], plan=plan, num_splits=None, shuffle_seed=0)
    stream = stream_of(whole, plan=plan, shuffle_seed=0)
    assert blocks_of(check_resume_at_every_step(stream, (2, 3))[:5]) == cycles_of([dataset])


def test_steps_are_cycles_of_blocks(whole: Any) -> None:
    for options, steps, last in (({}, 4, 4), ({"drop_last": True}, 3, 12), ({"blocks_per_epoch": 36}, 3, 12)):
        stream = stream_of(whole, global_batch_size=12, **options)
        found = global_batches(stream, 3, micro_batch_size=4)
        assert [batch.step for batch in found] == list(range(1, steps + 1))
        assert len(found[-1].columns["input_ids"]) == last
        with stream.open(rank=1, world_size=3) as shard:
            assert len(shard) == steps
            assert shard.num_rows == 12 * (steps - 1) + last
            assert shard.dropped_rows == 61 % SPLITS
            assert len(shard.iter_batches(micro_batch_size=2)) == 3 * (steps - 1) + (1 if last == 4 else 3)
            first = next(iter(shard.iter_batches()))
            assert len(first["input_ids"]) == 3
            assert shard.loss_scale == pytest.approx(3 * 3 / 12), "rows are blocks"


def test_a_step_beyond_the_epoch_is_refused_at_once(whole: Any) -> None:
    with pytest.raises(ConfigError, match=r"drop_last leaves no step.*10 cycles"):
        stream_of(whole, global_batch_size=44, drop_last=True)
    with pytest.raises(ConfigError, match="not a multiple of num_splits"):
        stream_of(whole, global_batch_size=42)
    assert len(global_batches(stream_of(whole, global_batch_size=44))) == 1


def test_all_formats_hold_the_same_blocks(whole: Any) -> None:
    expected = blocks_of(global_batches(stream_of(whole)))[:STEP]
    with stream_of(whole).open() as shard:
        state = shard.state_dict()

        def first(batches: Any) -> Any:
            shard.load_state_dict(state)
            return next(iter(batches))

        tensors = first(shard.iter_torch_batches())
        assert tensors["input_ids"].dtype == torch.int64 and tensors["doc_ids"].shape == (STEP, T)
        assert first(shard.iter_torch_batches(dtypes={"doc_ids": torch.int32}))["doc_ids"].dtype == torch.int32
        collated = first(shard.iter_torch_batches(collate_fn=lambda batch: torch.from_numpy(batch["input_ids"])))
        table = first(shard.iter_batches(batch_format="pyarrow"))
        frame = first(shard.iter_batches(batch_format="pandas"))
        view = first(shard.iter_batches(zero_copy=True))
        assert not view["input_ids"].flags.writeable
        for ids in (
            tensors["input_ids"],
            collated,
            table["input_ids"],
            np.stack(frame["input_ids"]),
            view["input_ids"],
        ):
            found = ids.to_pylist() if hasattr(ids, "to_pylist") else ids.tolist()
            assert found == [block[0] for block in expected]


def test_batches_are_the_trainers_own_and_tight_memory_changes_nothing(whole: Any) -> None:
    expected = blocks_of(global_batches(stream_of(whole)))
    tight = stream_of(whole, prefetch=PrefetchConfig(max_buffer_bytes=1, block_bytes=1))
    assert blocks_of(global_batches(tight, 3, prefetch_batches=0)) == expected
    found = []
    with stream_of(whole).open() as shard:
        for batch in shard.iter_batches(micro_batch_size=3, prefetch_batches=2):
            found += batch["input_ids"].tolist()
            batch["input_ids"][:] = batch["doc_ids"][:] = -7
    assert found == [block[0] for block in expected]


def test_a_loop_left_within_a_step_goes_on_with_the_next_block(whole: Any) -> None:
    expected = [block[0] for block in blocks_of(global_batches(stream_of(whole)))]
    found: list[list[int]] = []
    with stream_of(whole).open() as shard:
        for count in itertools.cycle((1, 2, 4)):
            before = len(found)
            for batch in itertools.islice(shard.iter_batches(micro_batch_size=3), count):
                found += batch["input_ids"].tolist()
            if shard.is_step_end:
                assert shard.state_dict()["blocks_emitted_per_split"] == [len(found) // SPLITS] * SPLITS
            else:
                with pytest.raises(StateError, match="at the end of a step"):
                    shard.state_dict()
            if len(found) == before or len(found) == len(expected):
                break
        assert found == expected
        assert shard.epoch == 0
        assert next(iter(shard.iter_batches()))["input_ids"].tolist() != expected[:STEP]
        assert shard.epoch == 1


def test_what_is_padded_and_left_is_counted(whole: Any) -> None:
    for blocks in (20, 72):
        (dataset,) = ranks(whole[1], order="feistel", blocks_per_epoch=blocks)
        cycles_of([dataset])
        stream = stream_of(whole, blocks_per_epoch=blocks)
        padded = left = 0
        for rank in range(3):
            with stream.open(rank=rank, world_size=3) as shard:
                for _ in shard.iter_batches():
                    assert shard.stats().documents_left == 0, "counted when the epoch is over"
                padded, left = padded + shard.stats().padded_tokens, left + shard.stats().documents_left
        assert (padded, left) == (dataset.padded_tokens, dataset.left_behind)
    assert padded > 0


def test_memory_stays_bounded(tmp_path: Path) -> None:
    rows, budget = 4000, 512 * 1024
    path = tmp_path / "long"
    table_of(path, [[7] * 200] * rows)
    stream = stream_of((str(path), None), blocks_per_epoch=80_000, prefetch=PrefetchConfig(max_buffer_bytes=budget))
    most = 0
    with stream.open() as shard:
        for _ in itertools.islice(shard.iter_batches(), 500):
            most = max(most, shard.stats().buffered_bytes)
    assert 0 < most < 2 * budget < rows * 200 * 8


# --- states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("whole", {}),
        ("whole", {"order": "lancedb", "blocks_per_epoch": 24}),
        ("holes", {"on_transform_error": "skip", "blocks_per_epoch": 28, "drop_last": True}),
    ],
    ids=str,
)
def test_a_resume_is_exact_after_every_step_at_every_size(
    whole: Any, holes: Any, case: str, options: dict[str, Any]
) -> None:
    stream = stream_of(whole if case == "whole" else holes, **options)
    batches = check_resume_at_every_step(stream, (1, 3, 4), micro_batch_size=4)
    assert {batch.epoch for batch in batches} == {0, 1}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_documents_at_any_size_and_resumed_anywhere(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    splits = data.draw(st.integers(1, 5), "splits")
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=splits, max_size=30), "lengths")
    size = data.draw(st.sampled_from([1, 3, 8, 50]), "size")
    cycles, per_step = data.draw(st.integers(1, 9), "cycles"), data.draw(st.integers(1, 4), "per step")
    documents = [[100 * d + 100 + t for t in range(length)] for d, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("any")
    table = table_of(path, documents)
    options: dict[str, Any] = PACKED | {
        "num_splits": splits,
        "pack_sequences": size,
        "blocks_per_epoch": cycles * splits,
        "order": data.draw(st.sampled_from(["feistel", "lancedb"]), "order"),
    }
    stream = LanceStream(str(path), "t", global_batch_size=per_step * splits, **options)
    expected = [block["input_ids"].tolist() for block in StreamingDataset(table, **options)]
    sizes = data.draw(st.lists(st.integers(1, splits), min_size=cycles, max_size=cycles), "sizes")
    found: list[Any] = []
    state = None
    while len(found) < len(expected):
        stop = data.draw(st.integers(1, 3), "stop")
        batches = global_batches(stream, sizes.pop(), state=state, stop_after=stop)
        found += [block for batch in batches for block in batch.columns["input_ids"].tolist()]
        state = json.loads(json.dumps(batches[-1].state))
    assert found == expected
    assert global_batches(stream, splits, state=state) == []


def test_states_are_small_and_name_documents_and_offsets(tmp_path: Path) -> None:
    documents = [list(range(10, 5_010))] * 20
    source = str(tmp_path), table_of(tmp_path, documents)
    batches = global_batches(stream_of(source, blocks_per_epoch=400), 2, stop_after=3)
    state = batches[-1].state
    assert "pack_buffers" not in state, "LanceDB must not take it for its own"
    assert state["samples_consumed_per_split"] == [0] * SPLITS
    assert state["pack_offsets"] == [3 * 2 * T] * SPLITS
    assert state["blocks_emitted_per_split"] == [6] * SPLITS
    assert len(json.dumps(state)) < 1000
    other = lancedb.streaming.StreamingDataset(source[1], **PACKED | {"blocks_per_epoch": 400})
    with pytest.raises(KeyError, match="pack_buffers"):
        other.load_state_dict(state)
    small = StreamState.from_dict(state).to_dict(compact=True)
    assert StreamState.from_dict(json.loads(json.dumps(small))) == StreamState.from_dict(state)


def test_a_state_of_one_replica_of_several_is_not_enough(whole: Any) -> None:
    stream, states = stream_of(whole), []
    for rank in range(2):
        with stream.open(rank=rank, world_size=2) as shard:
            assert shard.is_partial
            next(iter(shard.iter_batches()))
            states.append(shard.state_dict())
    for state in states:
        with stream.open() as shard, pytest.raises(StateError, match="merge the states"):
            shard.load_state_dict(state)
    with pytest.raises(StateError, match="different numbers of blocks"):
        merge_state_dicts(states[:1])
    assert merge_state_dicts(states[::-1]) == global_batches(stream, stop_after=1)[-1].state


def test_the_files_of_single_ranks_make_a_checkpoint(whole: Any, tmp_path: Path) -> None:
    stream = stream_of(whole)
    expected = global_batches(stream)
    filesystem, path = locate(tmp_path)
    for rank in range(3):
        with stream.open(rank=rank, world_size=3) as shard:
            for _ in itertools.islice(shard.iter_batches(), 2):
                pass
            write_streams(filesystem, path, {"train": shard.state()}, rank=rank)
    merged = read_streams(filesystem, path)
    assert merged is not None and merged["train"] == StreamState.from_dict(expected[1].state)
    resumed = stream_of(whole, resume_from=tmp_path)
    assert blocks_of(global_batches(resumed, 4)) == blocks_of(expected[2:])
    (tmp_path / "lance_stream.rank-00001.json").unlink()
    with pytest.raises(StateError, match="different numbers of blocks"):
        read_streams(filesystem, path)


def test_the_global_batch_may_change(whole: Any) -> None:
    expected = blocks_of(global_batches(stream_of(whole)))
    state = global_batches(stream_of(whole), 3, stop_after=2)[-1].state
    later = global_batches(stream_of(whole, global_batch_size=12), 2, state=state)
    assert [len(batch.columns["doc_ids"]) for batch in later] == [8, 12, 4]  # 4 cycles in; steps of 3
    assert blocks_of(later) == expected[2 * STEP :]


@pytest.mark.parametrize("case", ["whole", "holes"])
def test_lancedb_and_the_dataset_go_on_where_the_shard_stopped(whole: Any, holes: Any, case: str) -> None:
    source, skip = (whole, {}) if case == "whole" else (holes, {"on_transform_error": "skip"})
    options: dict[str, Any] = {"order": "lancedb"} | skip
    expected = cycles_of(ranks(source[1], **options))
    for world_size, step in ((1, 1), (2, 3), (3, 4), (4, 5)):
        state = global_batches(stream_of(source, **options), world_size, stop_after=step)[-1].state
        state = json.loads(json.dumps(state))
        other = lancedb.streaming.StreamingDataset(source[1], **PACKED | skip)
        other.load_state_dict(state)
        assert taken(other) == expected[step * STEP :]
        datasets = ranks(source[1], 3, state, **options)
        assert saved(datasets) == state
        assert cycles_of(datasets) == expected[step * STEP :]


@pytest.mark.parametrize("case", ["whole", "holes"])
def test_the_shard_goes_on_where_lancedb_and_the_dataset_stopped(
    whole: Any, holes: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, skip = (whole, {}) if case == "whole" else (holes, {"on_transform_error": "skip"})
    expected = cycles_of(ranks(source[1], **skip))
    stream = stream_of(source, order="lancedb", **skip)
    for cycle in (1, 4, 7, 10):
        other, ours = lancedb.streaming.StreamingDataset(source[1], **PACKED | skip), ranks(source[1], 2, **skip)
        taken(other, cycle * SPLITS)
        cycles_of(ours, cycle)
        for state in (json.loads(json.dumps(other.state_dict())), saved(ours)):
            for world_size in (1, 3, 4):
                found = global_batches(stream, world_size, state=state)
                assert blocks_of(found) == expected[cycle * SPLITS :]
            resumed = stream_of(source, order="lancedb", resume_from=state, **skip)
            assert blocks_of(global_batches(resumed, 2)) == expected[cycle * SPLITS :]
    assert "does not say what it was taken from" in caplog.text


def test_the_dataset_and_the_shard_take_turns(whole: Any) -> None:
    """In our own order, where states name offsets: from one to the other and back, every step."""
    options = {"order": "feistel"}
    expected = cycles_of(ranks(whole[1], **options))
    state: Any = None
    found: list[Block] = []
    for turn in range(5):
        if turn % 2:
            datasets = ranks(whole[1], 3, state, **options)
            assert StreamState.from_dict(saved(datasets)).packed == StreamState.from_dict(state).packed
            found += cycles_of(datasets, 2)
            state = saved(datasets)
        else:
            batches = global_batches(stream_of(whole), 1 + turn // 2, state=state, stop_after=1)
            found += blocks_of(batches)
            state = json.loads(json.dumps(batches[-1].state))
    assert found == expected


def test_others_are_never_said_to_be_further_than_they_are(whole: Any) -> None:
    position = Position.start(stream_of(whole).config)
    own = PackPlace(SplitCursor(documents=3, offset=1, blocks=2))
    assert position.places_with(range(1, 3), (own, own)) == (PackPlace(), own, own, PackPlace())


# --- an estimate ---------------------------------------------------------------------------------------


def test_an_estimate_is_the_datasets_and_a_state_brings_its_own(tmp_path: Path) -> None:
    table = table_of(tmp_path, [[3] * (d % 50) for d in range(900)])
    source = str(tmp_path), table
    with pytest.warns(UserWarning, match=r"of 900 documents, with a standard error of \d"):
        stream = stream_of(source, blocks_per_epoch="auto", order="lancedb")
    with pytest.warns(UserWarning, match="estimate"):
        (dataset,) = ranks(table, blocks_per_epoch="auto")
    batches = global_batches(stream, 2, stop_after=3)
    blocks = dataset.state_dict()["blocks_per_epoch"]
    assert batches[-1].state["blocks_per_epoch"] == blocks
    with stream.open() as shard:
        assert len(shard) == -(-blocks // STEP) and shard.num_rows == blocks
        assert shard.packing is not None and shard.packing.blocks_per_epoch == blocks
    table.add(pa.table({"id": pa.array([0] * 500), "tokens": pa.array([[4] * 99] * 500, pa.list_(pa.int32()))}))
    with pytest.warns(UserWarning, match="1400 documents"):
        later = stream_of(source, blocks_per_epoch="auto", order="lancedb")
    with later.open() as shard:
        assert shard.num_rows != blocks
        shard.load_state_dict(batches[-1].state)
        assert shard.num_rows == blocks
    assert blocks_of(global_batches(later, 3, state=batches[-1].state)) == cycles_of([dataset])[3 * STEP :]


# --- documents that fail -----------------------------------------------------------------------------


def test_documents_that_fail_are_left_out_or_replaced_as_by_the_dataset(holes: Any) -> None:
    for policy in ("skip", ReplaceRow({"tokens": [77]})):
        options: dict[str, Any] = {"on_transform_error": policy, "blocks_per_epoch": 80}
        (dataset,) = ranks(holes[1], order="feistel", **options)
        expected = cycles_of([dataset])
        assert blocks_of(global_batches(stream_of(holes, **options), 3)) == expected
        with stream_of(holes, **options).open() as shard:
            for _ in shard.iter_batches():
                pass
            assert [row.row_number for row in shard.skipped] == [row.row_number for row in dataset.skipped]
            assert shard.stats().rows_skipped == dataset.rows_skipped
    with pytest.raises(Exception, match=r"^pack_sequences does not support null token lists or values.*filter"):
        global_batches(stream_of(holes))
    with pytest.raises(TransformError, match=r"ReplaceRow\(\[77\]\).*tokens \(large_list"):
        global_batches(stream_of(holes, on_transform_error=ReplaceRow([77])))


# --- what is refused ---------------------------------------------------------------------------------


def test_states_of_another_packing_name_the_field(whole: Any) -> None:
    state = global_batches(stream_of(whole), stop_after=1)[-1].state
    for name, value in {"pack_sequences": 9, "eos_id": 3, "pad_id": 3, "blocks_per_epoch": 44}.items():
        with (
            stream_of(whole, **{name: value}).open() as shard,
            pytest.raises(StateMismatchError, match=f"{name} differs") as caught,
        ):
            shard.load_state_dict(state)
        assert (caught.value.field, caught.value.saved, caught.value.current) == (name, PACKED[name], value)
    rows = LanceStream(whole[0], "t", num_splits=SPLITS, global_batch_size=STEP, shuffle_seed=5)
    of_rows = global_batches(rows, stop_after=1)[-1].state
    for stream, other in ((rows, state), (stream_of(whole), of_rows)):
        with stream.open() as shard, pytest.raises(StateMismatchError, match="pack_sequences differs"):
            shard.load_state_dict(other)
    with pytest.raises(StateMismatchError, match="pack_sequences differs"):
        merge_state_dicts([state, of_rows])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pack_offsets", None), ("pack_offsets", [1, 2]), ("pack_offsets", [-1] * 4), ("pack_tokens", None),
        ("blocks_emitted_per_split", [1, 2]), ("samples_consumed_per_split", "x"),
        ("blocks_emitted_per_split", [11] * 4), ("samples_consumed_per_split", [99] * 4),
        ("pack_tokens", {"0": {"tokens": [1], "starts": []}}),
    ],
)  # fmt: skip
def test_damaged_states_are_refused(whole: Any, key: str, value: Any) -> None:
    state = global_batches(stream_of(whole), stop_after=1)[-1].state
    assert any(state["pack_offsets"])
    state["pack_offsets"][0] = state["pack_offsets"][0] or 1
    with stream_of(whole).open() as shard:
        shard.load_state_dict(state)
        with pytest.raises(StateError):
            shard.load_state_dict(state | {key: value})
        assert shard.state_dict()["samples_consumed_per_split"] == state["samples_consumed_per_split"]


def test_an_offset_that_no_document_has_is_found_when_it_is_read(whole: Any) -> None:
    state = global_batches(stream_of(whole), stop_after=1)[-1].state
    state["pack_offsets"] = [5_000] * SPLITS
    with stream_of(whole).open() as shard:
        shard.load_state_dict(state)
        with pytest.raises(StateError, match="the document that the state was taken in is not there"):
            next(iter(shard.iter_batches()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transform": list}, "transform cannot be combined"),
        ({"columns": None}, "exactly one column"),
        ({"columns": ["tokens", "id"]}, "exactly one column"),
        ({"columns": ["id"]}, "'id' does not hold token lists"),
        ({"columns": ["token"]}, "did you mean 'tokens'"),
        ({"blocks_per_epoch": 41}, "not a multiple of num_splits"),
        ({"blocks_per_epoch": "most"}, "blocks_per_epoch"),
        ({"eos_id": None}, "eos_id"),
        ({"pad_id": 1.0}, "pad_id"),
        ({"pack_sequences": 0}, "pack_sequences"),
        ({"pack_sequences": None}, "requires pack_sequences"),
    ],
)
def test_what_cannot_be_packed_is_said_at_once_and_as_by_the_dataset(
    whole: Any, options: dict[str, Any], said: str
) -> None:
    errors = []
    for make in (lambda: stream_of(whole, **options), lambda: ranks(whole[1], **options)):
        with pytest.raises(ConfigError, match=said) as caught:
            make()
        errors.append(str(caught.value))
    # Where the table is at fault, a stream adds that version= can name an earlier one; a dataset is given the version.
    assert errors[0].partition(" That is so in version ")[0] == errors[1]


def test_a_given_number_of_blocks_warns_of_nothing_and_ids_mean_nothing_without_packing(whole: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream_of(whole)
        config: StreamConfig = stream_of(whole, pack_sequences=None, blocks_per_epoch=None).config
    assert config.packing is None and config.provenance.packing is None
