"""Packed datasets: blocks, states after every step at any number of ranks, skips, counts, LanceDB's side."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lancedb.streaming
import numpy as np
import pyarrow as pa
import pytest
import torch
from packed import (
    DOCUMENTS,
    EOS,
    PACKED,
    PAD,
    SPLITS,
    Block,
    T,
    cycles_of,
    ranks,
    saved,
    table_of,
    taken,
    with_holes,
)

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    ReplaceRow,
    StateError,
    StateMismatchError,
    StreamingDataLoader,
    StreamingDataset,
    load_rank_states,
    merge_state_dicts,
    save_rank_state,
)
from ray_lance_stream.state import StreamState

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return table_of(tmp_path_factory.mktemp("documents"), DOCUMENTS)


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return table_of(tmp_path_factory.mktemp("holes"), with_holes())


def model(table: Any, documents: list[Any], blocks: int, **options: Any) -> tuple[list[Block], int, int, int]:
    """Packs token by token what an unpacked dataset of the same order yields.

    Returns:
        The blocks in order, tokens of padding, tokens cut off documents, and documents that were not begun.
    """
    unpacked = StreamingDataset(table, num_splits=SPLITS, columns=["id"], shuffle_seed=5, **options)
    rows = [row["id"] for row in unpacked]
    splits, padded, cut, unused = [], 0, 0, 0
    for split in range(SPLITS):
        stream = [
            (token, 100 * row + (place == 0))
            for row in rows[split::SPLITS]
            for place, token in enumerate([*documents[row], EOS])
        ]
        ends = np.cumsum([len(documents[row]) + 1 for row in rows[split::SPLITS]])
        share = blocks // SPLITS * T
        unused += int((ends > share).sum()) - int(bool((ends > share).any()))
        first_cut = ends[ends > share][:1]
        begun_at = 0 if not len(first_cut) else int(ends[ends <= share][-1] if (ends <= share).any() else 0)
        if len(first_cut) and begun_at == share:
            unused += 1  # the document behind the last block was not begun
        elif len(first_cut):
            cut += int(first_cut[0]) - share
        padded += max(0, share - len(stream))
        tokens = [token for token, _ in stream[:share]] + [PAD] * max(0, share - len(stream))
        starts = [mark % 100 for _, mark in stream[:share]] + [0] * max(0, share - len(stream))
        made: list[Block] = []
        for begin in range(0, share, T):
            doc_ids = np.cumsum([0, *starts[begin + 1 : begin + T]])
            made.append((tokens[begin : begin + T], doc_ids.tolist()))
        splits.append(made)
    return [block for turn in zip(*splits, strict=True) for block in turn], padded, cut, unused


@pytest.mark.parametrize("options", [{}, {"order": "feistel", "epoch": 3}, {"shuffle": False}], ids=str)
@pytest.mark.parametrize("blocks", [40, 20, 72])
def test_blocks_and_counts_are_those_of_packing_token_by_token(table: Any, blocks: int, options: Any) -> None:
    expected, padded, cut, unused = model(table, DOCUMENTS, blocks, **options)
    for world_size in (1, 2, 3):
        datasets = ranks(table, world_size, blocks_per_epoch=blocks, **options)
        assert cycles_of(datasets) == expected
        assert sum(dataset.padded_tokens for dataset in datasets) == padded
        assert sum(dataset.dropped_tokens for dataset in datasets) == cut
        assert sum(dataset.left_behind for dataset in datasets) == unused


@pytest.mark.parametrize("case", ["whole", "holes"])
def test_a_state_after_every_step_continues_at_any_number_of_ranks(table: Any, holes: Any, case: str) -> None:
    source, options = (table, {}) if case == "whole" else (holes, {"on_transform_error": "skip"})
    expected = cycles_of(ranks(source, **options))
    assert len(expected) == 40
    for world_size in (1, 2):
        running = ranks(source, world_size, **options)
        for cycle in range(11):
            assert cycles_of(running, 1 if cycle else 0) == expected[max(0, cycle - 1) * SPLITS : cycle * SPLITS]
            state = saved(running)
            for other in (1, 2, 3):
                resumed = ranks(source, other, state, **options)
                assert saved(resumed) == state
                assert cycles_of(resumed) == expected[cycle * SPLITS :]


def test_resumed_again_and_again(table: Any) -> None:
    expected, state, found = cycles_of(ranks(table)), None, []
    for world_size in (1, 2, 4, 3, 2, 1, 4, 2, 1, 2):
        datasets = ranks(table, world_size, state)
        found += cycles_of(datasets, 1)
        state = saved(datasets)
    assert found == expected
    assert cycles_of(ranks(table, 2, state)) == []  # the empty remainder, once


def test_epochs_follow_one_another(table: Any) -> None:
    dataset = ranks(table)[0]
    epochs = [taken(dataset) for _ in range(3)]
    assert epochs == [cycles_of(ranks(table, epoch=epoch)) for epoch in range(3)]
    resumed = ranks(table, 1, dataset.state_dict())[0]
    assert taken(resumed) == []
    assert taken(resumed) == cycles_of(ranks(table, epoch=3))
    assert resumed.state_dict()["epoch"] == 3


def test_a_loop_that_is_left_anywhere_is_taken_up_where_it_was(table: Any) -> None:
    expected, dataset = cycles_of(ranks(table)), ranks(table)[0]
    found: list[Block] = []
    for count in (1, 2, 3, 5, 7, 11):
        found += taken(dataset, count)
        if len(found) % SPLITS:
            with pytest.raises(StateError, match="at the end of a step only"):
                dataset.state_dict()
        dataset = pickle.loads(pickle.dumps(dataset))
    mark = dataset._mark()
    assert taken(dataset, 6) == expected[29:35]
    dataset._rewind(mark)
    assert found + taken(dataset) == expected
    assert dataset.padded_tokens == sum(block[0].count(PAD) for block in expected)


def test_parts_of_a_rank(table: Any) -> None:
    class Worker:
        num_workers = 2

        def __init__(self, number: int) -> None:
            self.id = number

    expected = cycles_of(ranks(table))
    parts = [ranks(table, worker_info_override=Worker(i))[0] for i in range(2)]
    first, second = (taken(part) for part in parts)
    turns = zip(first[0::2], first[1::2], second[0::2], second[1::2], strict=True)
    assert [block for turn in turns for block in turn] == expected


def test_blocks_are_the_consumers_own_and_tight_memory_changes_nothing(table: Any) -> None:
    expected, found = cycles_of(ranks(table)), []
    for block in ranks(table, max_buffer_bytes=1)[0]:
        found.append((block["input_ids"].tolist(), block["doc_ids"].tolist()))
        block["input_ids"].fill_(-7)
        block["doc_ids"].fill_(-7)
    assert found == expected


def test_long_documents(tmp_path: Path) -> None:
    """Documents far longer than what is packed at a time, over many blocks each."""
    documents = [list(range(10_000 * d + 10, 10_000 * d + 10 + 9_000)) for d in range(9)]
    table = table_of(tmp_path, documents)
    expected, *_ = model(table, documents, 8_000)
    datasets = ranks(table, blocks_per_epoch=8_000)
    assert cycles_of(datasets, 1_500) == expected[: 1_500 * SPLITS]
    assert cycles_of(ranks(table, 2, saved(datasets), blocks_per_epoch=8_000)) == expected[1_500 * SPLITS :]


def unbatched(batches: Iterable[Any]) -> list[Block]:
    return [
        (ids.tolist(), docs.tolist())
        for batch in batches
        for ids, docs in zip(batch["input_ids"], batch["doc_ids"], strict=True)
    ]


def test_batches_of_a_loader(table: Any) -> None:
    expected, dataset = cycles_of(ranks(table)), ranks(table)[0]
    loader = StreamingDataLoader(dataset, batch_size=8)
    first = list(itertools.islice(loader, 2))
    assert first[0]["input_ids"].shape == first[0]["doc_ids"].shape == (8, T)
    state = loader.state_dict()
    assert state["blocks_emitted_per_split"] == [4] * SPLITS
    assert unbatched(first) + unbatched(loader) == expected
    assert unbatched(StreamingDataLoader(ranks(table, 1, state)[0], batch_size=5)) == expected[16:]


def test_a_batch_that_fails_is_not_consumed(table: Any) -> None:
    calls = itertools.count()

    def collate(rows: list[Any]) -> Any:
        if next(calls) == 2:
            raise KeyError("once")
        return torch.utils.data.default_collate(rows)

    loader, batches = StreamingDataLoader(ranks(table)[0], batch_size=6, collate_fn=collate), []
    with pytest.raises(KeyError, match="once"):
        for batch in loader:
            batches.append(batch)
    assert len(batches) == 2
    assert unbatched(batches) + unbatched(loader) == cycles_of(ranks(table))


def test_states_saved_one_file_per_rank(table: Any, tmp_path: Path) -> None:
    expected, running = cycles_of(ranks(table)), ranks(table, 2)
    cycles_of(running, 3)
    for dataset in running:
        save_rank_state(dataset, tmp_path)
    state = load_rank_states(tmp_path)
    assert state == saved(running)
    assert cycles_of(ranks(table, 3, state)) == taken(theirs(table, state)) == expected[3 * SPLITS :]


# --- rows that fail ----------------------------------------------------------------------------------


def test_null_documents_are_skipped_and_told_of(holes: Any) -> None:
    dataset = ranks(holes, on_transform_error="skip", blocks_per_epoch=80, shuffle=False)[0]
    found = {token for block in taken(dataset) for token in block[0]} - {EOS, PAD}
    bad = set(range(3, 61, 7)) | set(range(5, 61, 11))
    left_out = {row.row_number for row in dataset.skipped}
    assert left_out == bad - {60}  # 61 rows in 4 splits: the plan leaves the last one out
    assert dataset.rows_skipped == len(left_out)
    assert {row.reason for row in dataset.skipped} == {
        "ValueError: pack_sequences does not support null token lists or values"
    }
    assert found <= {token for d in range(61) if d not in bad for token in DOCUMENTS[d]}


def test_null_documents_end_the_iteration_if_nothing_else_is_said(holes: Any) -> None:
    with pytest.raises(ValueError, match="pack_sequences does not support null token lists or values"):
        taken(ranks(holes)[0])


def test_tokens_that_do_not_fit_are_told_of(tmp_path: Path) -> None:
    large = pa.table({"tokens": pa.array([[1, 2**63 + i] for i in range(12)], pa.list_(pa.uint64()))})
    table = lancedb.connect(tmp_path).create_table("large", large)
    with pytest.raises(ValueError, match=r"pack_sequences supports tokens that are 64-bit integers.*9223372036854775"):
        taken(ranks(table)[0])


def test_a_document_in_place_of_those_that_fail(holes: Any) -> None:
    dataset = ranks(holes, on_transform_error=ReplaceRow({"tokens": [77]}), blocks_per_epoch=80)[0]
    tokens = [token for block in taken(dataset) for token in block[0]]
    assert tokens.count(77) == len(dataset.skipped) > 5
    assert dataset.rows_skipped == 0


# --- the budget --------------------------------------------------------------------------------------


def test_an_estimated_budget_is_lancedbs_and_a_state_keeps_its_own(tmp_path: Path) -> None:
    documents = [[3] * (d % 50) for d in range(900)]
    table = table_of(tmp_path, documents)
    with pytest.warns(UserWarning, match=r"of 900 documents, with a standard error of \d"):
        dataset = ranks(table, blocks_per_epoch="auto")[0]
    with pytest.warns(UserWarning, match="approximate"):
        theirs = lancedb.streaming.StreamingDataset(table, **PACKED | {"blocks_per_epoch": "auto"})
    state = dataset.state_dict()
    assert state["blocks_per_epoch"] == theirs.state_dict()["blocks_per_epoch"]
    cycles_of([dataset], 3)
    rest_of = copy.deepcopy(dataset.state_dict())
    table.add(pa.table({"id": pa.array([0] * 500), "tokens": pa.array([[4] * 99] * 500, pa.list_(pa.int32()))}))
    with pytest.warns(UserWarning, match="1400 documents"):
        resumed = ranks(table, 1, rest_of, blocks_per_epoch="auto")[0]
    assert resumed.state_dict()["blocks_per_epoch"] == state["blocks_per_epoch"]
    assert taken(resumed) == taken(dataset)


def test_an_estimate_looks_past_documents_that_are_skipped(holes: Any) -> None:
    with pytest.warns(UserWarning, match="estimate"):
        dataset = ranks(holes, on_transform_error="skip", blocks_per_epoch="auto", num_splits=15)[0]
    assert dataset.state_dict()["blocks_per_epoch"] % 15 == 0


# --- states ------------------------------------------------------------------------------------------


def test_the_saved_form_is_pinned(table: Any) -> None:
    dataset = ranks(table, shuffle=False)[0]
    cycles_of([dataset], 2)
    state = dataset.state_dict()
    provenance = state.pop("provenance")
    assert provenance["pack_sequences"] == {"pack_sequences": T, "eos_id": EOS, "pad_id": PAD, "blocks_per_epoch": 40}
    assert list(state) == [
        "format", "shuffle_seed", "num_splits", "epoch", "samples_consumed_per_split", "pack_sequences", "eos_id",
        "pad_id", "blocks_per_epoch", "blocks_emitted_per_split", "pack_buffers",
    ]  # fmt: skip
    assert state["blocks_emitted_per_split"] == [2, 2, 2, 2]
    assert set(state["pack_buffers"]) == {"0", "1", "2", "3"}
    whole = StreamState.from_dict(dataset.state_dict())
    small = whole.to_dict(compact=True)
    assert small["blocks_emitted_per_split"] == 2
    assert StreamState.from_dict(small) == StreamState.from_dict(json.loads(json.dumps(small))) == whole


def test_states_of_another_packing_name_the_field(table: Any) -> None:
    state = ranks(table)[0].state_dict()
    for name, value in {"pack_sequences": 9, "eos_id": 3, "pad_id": 3, "blocks_per_epoch": 44}.items():
        for saved_by in (state, {key: value for key, value in state.items() if key not in ("format", "provenance")}):
            with pytest.raises(StateMismatchError, match=f"{name} differs") as caught:
                ranks(table, 1, saved_by, **{name: value})
            assert (caught.value.field, caught.value.saved, caught.value.current) == (name, PACKED[name], value)


def test_packed_and_unpacked_states_do_not_mix(table: Any) -> None:
    rows = StreamingDataset(table, num_splits=SPLITS, shuffle_seed=5)
    packed = ranks(table)[0]
    for dataset, state in ((rows, packed.state_dict()), (packed, rows.state_dict())):
        with pytest.raises(StateMismatchError, match="pack_sequences differs") as caught:
            dataset.load_state_dict(state)
        assert caught.value.field == "pack_sequences"
    with pytest.raises(StateMismatchError, match="pack_sequences differs"):
        merge_state_dicts([packed.state_dict(), rows.state_dict()])
    uri = str(table.uri if hasattr(table, "uri") else table._conn.uri).removesuffix("/t.lance")
    settings: dict[str, Any] = {"num_splits": SPLITS, "global_batch_size": SPLITS, "shuffle_seed": 5}
    stream = LanceStream(uri, "t", order="lancedb", **settings)
    with stream.open() as shard, pytest.raises(StateMismatchError, match="pack_sequences differs"):
        shard.load_state_dict(packed.state_dict())


def test_a_state_of_one_rank_of_several_is_not_enough(table: Any) -> None:
    datasets = ranks(table, 2)
    for dataset in datasets:
        taken(dataset, 2)
    with pytest.raises(StateError, match="merge the states"):
        ranks(table, 2, datasets[0].state_dict())
    with pytest.raises(StateError, match="different numbers of blocks"):
        merge_state_dicts([datasets[1].state_dict()])
    taken(datasets[0], 2)
    with pytest.raises(StateError, match="different numbers of blocks"):
        merge_state_dicts([dataset.state_dict() for dataset in datasets])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pack_buffers", None), ("pack_buffers", {"9": {"tokens": [], "starts": []}}), ("blocks_per_epoch", 41),
        ("blocks_emitted_per_split", [1, 2]), ("samples_consumed_per_split", "x"), ("eos_id", None),
        ("blocks_emitted_per_split", [11, 11, 11, 11]),
    ],
)  # fmt: skip
def test_damaged_states_are_refused(table: Any, key: str, value: Any) -> None:
    theirs = {k: v for k, v in ranks(table)[0].state_dict().items() if k not in ("format", "provenance")}
    with pytest.raises(StateError):
        ranks(table, 1, theirs | {key: value})
    ours = ranks(table)[0].state_dict()
    if key in ("eos_id", "blocks_per_epoch"):
        ours["provenance"]["pack_sequences"][key] = value
    with pytest.raises(StateError):
        ranks(table, 1, ours | {key: value})


def test_a_state_beyond_the_table_is_refused(table: Any) -> None:
    state = ranks(table)[0].state_dict() | {"samples_consumed_per_split": [99] * 4}
    with pytest.raises(StateError, match="beyond the end"):
        taken(ranks(table, 1, state)[0])


# --- side by side ------------------------------------------------------------------------------------


def theirs(table: Any, state: Any = None, **options: Any) -> Any:
    dataset = lancedb.streaming.StreamingDataset(table, **PACKED | options)
    if state is not None:
        dataset.load_state_dict(state)
    return dataset


@pytest.mark.parametrize("case", ["whole", "holes"])
def test_lancedb_goes_on_where_we_stopped_and_we_where_it_did(table: Any, holes: Any, case: str) -> None:
    source, options = (table, {}) if case == "whole" else (holes, {"on_transform_error": "skip"})
    expected = taken(theirs(source, **options))
    assert cycles_of(ranks(source, **options)) == expected
    for cycle in (1, 4, 9, 10):
        other, ours = theirs(source, **options), ranks(source, 2, **options)
        assert taken(other, cycle * SPLITS) == cycles_of(ours, cycle) == expected[: cycle * SPLITS]
        their_state, our_state = json.loads(json.dumps(other.state_dict())), saved(ours)
        assert {key: our_state[key] for key in their_state} == their_state
        assert taken(theirs(source, our_state, **options)) == expected[cycle * SPLITS :]
        for world_size in (1, 2, 3):
            assert cycles_of(ranks(source, world_size, their_state, **options)) == expected[cycle * SPLITS :]


# --- arguments ---------------------------------------------------------------------------------------


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
        ({"pack_sequences": None}, "requires pack_sequences"),
    ],
)
def test_what_cannot_be_packed_is_said_at_once(table: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ranks(table, **options)


def test_a_given_budget_warns_of_nothing(table: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks(table)
