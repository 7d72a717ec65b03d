"""Packed token sequences: LanceDB's blocks, bit for bit, and states that travel both ways."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streaming.conftest import new_table
from streaming.sides import LANCEDB, OURS, SPLITS, Side, canonical, merged, saved

pytestmark = pytest.mark.thorough

Block = tuple[tuple[int, ...], tuple[int, ...]]
PACKED: dict[str, Any] = {"columns": ["tokens"], "pack_sequences": 8, "eos_id": 1, "pad_id": 2, "blocks_per_epoch": 40}


@pytest.fixture(autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """Skips what asks for ours until it packs."""
    names = request.fixturenames
    asks = "ours" in names or "writer_and_reader" in names
    asks = asks or ("side" in names and request.getfixturevalue("side") is OURS)
    if asks and "pack_sequences" not in inspect.signature(OURS.dataset.__init__).parameters:
        pytest.skip("not built yet")


def blocks(rows: Iterable[Any], count: int | None = None) -> list[Block]:
    """Takes the next ``count`` blocks as tuples of (input_ids, doc_ids), checking their form."""
    found = list(itertools.islice(rows, count))
    for block in found:
        assert list(block) == ["input_ids", "doc_ids"]
        assert {str(tensor.dtype) for tensor in block.values()} == {"torch.int64"}
    return [(tuple(block["input_ids"].tolist()), tuple(block["doc_ids"].tolist())) for block in found]


def packed(side: Side, documents: Any, world_size: int = 1, **options: Any) -> list[Any]:
    return side.open(documents, world_size, **PACKED | options)


def in_order(datasets: list[Any], cycles: int | None = None) -> list[Any]:
    """The blocks of all ranks in the one order, of some cycles or to the end."""
    owned = SPLITS // len(datasets)
    shares = [blocks(dataset, None if cycles is None else cycles * owned) for dataset in datasets]
    return canonical(shares)  # type: ignore[arg-type]  # works on anything


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="some splits are padded"),
        pytest.param({"blocks_per_epoch": 20}, id="tokens are left over"),
        pytest.param({"blocks_per_epoch": 80, "shuffle": False}, id="blocks of padding alone"),
        pytest.param({"pack_sequences": 1, "blocks_per_epoch": 24}, id="one token a block"),
        pytest.param({"pack_sequences": 50, "blocks_per_epoch": 8}, id="long blocks"),
        pytest.param({"eos_id": 7, "pad_id": 7, "epoch": 2}, id="one id for both"),
        pytest.param({"filter": "array_length(tokens) > 2", "shuffle_clump_size": 3}, id="filter and clumps"),
    ],
)
def test_the_blocks_are_lancedbs(ours: Side, documents: Any, options: dict[str, Any]) -> None:
    for world_size in (1, 2, 4):
        theirs = [blocks(dataset) for dataset in packed(LANCEDB, documents, world_size, **options)]
        mine = [blocks(dataset) for dataset in packed(ours, documents, world_size, **options)]
        assert mine == theirs


def test_every_world_size_gets_the_same_blocks(side: Side, documents: Any) -> None:
    runs = [in_order(packed(side, documents, size)) for size in (1, 2, 4)]
    assert runs[1] == runs[0]
    assert runs[2] == runs[0]
    assert len(runs[0]) == 40


def test_a_state_after_any_step_continues_at_another_world_size(side: Side, documents: Any) -> None:
    expected = in_order(packed(side, documents))
    for before, after in ((1, 2), (2, 4), (4, 1)):
        datasets, begin = packed(side, documents, before), 0
        for cycle in side.some(11):
            assert in_order(datasets, cycle - begin) == expected[begin * 4 : cycle * 4]
            rest = in_order(packed(side, documents, after, state=merged(side, datasets)))
            assert rest == expected[cycle * 4 :]
            begin = cycle


def test_a_state_travels(writer_and_reader: tuple[Side, Side], documents: Any) -> None:
    writer, reader = writer_and_reader
    expected = in_order(packed(LANCEDB, documents))
    for before, after, cycle in ((1, 1, 3), (2, 4, 5), (4, 2, 9), (1, 2, 10)):
        datasets = packed(writer, documents, before)
        assert in_order(datasets, cycle) == expected[: cycle * 4]
        state = merged(writer, datasets)
        assert in_order(packed(reader, documents, after, state=state)) == expected[cycle * 4 :]


def test_both_sides_keep_the_same_state(ours: Side, documents: Any) -> None:
    for world_size in (1, 2):
        theirs, mine = (packed(side, documents, world_size) for side in (LANCEDB, ours))
        for cycles in (0, 1, 4, 5):
            assert in_order(theirs, cycles) == in_order(mine, cycles)
            their_state, our_state = merged(LANCEDB, theirs), saved(merged(ours, mine))
            assert {key: our_state.get(key) for key in their_state} == saved(their_state)


def test_no_state_inside_a_step(side: Side, documents: Any) -> None:
    dataset = packed(side, documents)[0]
    iterator = iter(dataset)
    blocks(iterator, 6)
    with pytest.raises((RuntimeError, ValueError), match=r"step|cycle"):
        dataset.state_dict()
    blocks(iterator, 2)
    assert dataset.state_dict()["blocks_emitted_per_split"] == [2, 2, 2, 2]


def test_a_loop_that_was_left_is_taken_up_again(side: Side, documents: Any) -> None:
    dataset, expected = packed(side, documents)[0], in_order(packed(side, documents))
    taken: list[Block] = []
    for count in (4, 8, 4):
        taken += blocks(dataset, count)
    assert taken + blocks(dataset) == expected


def test_a_budget_that_is_estimated(ours: Side, documents: Any) -> None:
    with pytest.warns(UserWarning, match="blocks_per_epoch"):
        theirs = packed(LANCEDB, documents, blocks_per_epoch="auto")
    with pytest.warns(UserWarning, match="blocks_per_epoch"):
        mine = packed(ours, documents, blocks_per_epoch="auto")
    assert mine[0].state_dict()["blocks_per_epoch"] == theirs[0].state_dict()["blocks_per_epoch"]


@pytest.mark.parametrize("kind", [pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.list_(pa.int32(), 5)], ids=str)
def test_token_columns(ours: Side, tmp_path: Path, kind: pa.DataType) -> None:
    tokens = pa.array([[10 * d + t for t in range(5)] for d in range(12)], kind)
    table = new_table(tmp_path, pa.table({"tokens": tokens}))
    theirs = blocks(packed(LANCEDB, table, blocks_per_epoch=12)[0])
    assert blocks(packed(ours, table, blocks_per_epoch=12)[0]) == theirs


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("bad", [None, [1, None]], ids=["no list", "no token"])
def test_documents_that_are_null(side: Side, tmp_path: Path, bad: Any, mode: str) -> None:
    rows: list[Any] = [[10 * d, 10 * d + 1] for d in range(12)]
    rows[5] = bad
    table = new_table(tmp_path, pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}))
    dataset = packed(side, table, blocks_per_epoch=4, pack_sequences=9, on_transform_error=mode)[0]
    if mode == "raise":
        with pytest.raises(Exception, match="null"):
            blocks(dataset)
    else:
        found = {token for block in blocks(dataset) for token in block[0]}
        assert found == {t for d in range(12) if d != 5 for t in rows[d]} | {1, 2}
        assert dataset.rows_skipped == 1


def test_documents_that_are_all_null_are_blocks_of_padding(side: Side, tmp_path: Path) -> None:
    table = new_table(tmp_path, pa.table({"tokens": pa.array([None] * 12, pa.list_(pa.int32()))}))
    dataset = packed(side, table, blocks_per_epoch=8, on_transform_error="skip")[0]
    assert blocks(dataset) == [((2,) * 8, (0,) * 8)] * 8
    assert dataset.rows_skipped == 12


def test_documents_that_are_ready_are_counted(ours: Side, tmp_path: Path) -> None:
    """With all read and none waiting for the transform, "0 ready" would say that storage is the limit."""
    tokens = pa.array([[d] * (d % 9) for d in range(400)], pa.list_(pa.int32()))
    table = new_table(tmp_path, pa.table({"tokens": tokens}))
    dataset = packed(ours, table, blocks_per_epoch=8000, shuffle=False)[0]  # more than there are tokens
    iterator = iter(dataset)
    blocks(iterator, 4)
    assert dataset.unscanned_rows == 0
    assert dataset.consumed_rows > 4
    assert dataset.prefetch_queue_depth == 400 - dataset.consumed_rows
    before = dataset.consumed_rows
    blocks(iterator, 40)
    assert dataset.consumed_rows > before
    assert dataset.prefetch_queue_depth == 400 - dataset.consumed_rows
    blocks(iterator)
    assert (dataset.prefetch_queue_depth, dataset.consumed_rows) == (0, 400)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pack_sequences": 0}, "pack_sequences"),
        ({"eos_id": None}, "eos_id"),
        ({"pad_id": None}, "pad_id"),
        ({"blocks_per_epoch": None}, "blocks_per_epoch"),
        ({"blocks_per_epoch": 0}, "blocks_per_epoch"),
        ({"blocks_per_epoch": 4.0}, "blocks_per_epoch"),
        ({"blocks_per_epoch": True}, "blocks_per_epoch"),
        ({"blocks_per_epoch": 42}, "num_splits"),
        ({"transform": list}, "transform"),
        ({"columns": None}, "columns"),
        ({"columns": ["tokens", "tokens"]}, "columns"),
        ({"pack_sequences": None}, "blocks_per_epoch"),
    ],
)
def test_what_cannot_be_packed(side: Side, documents: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        packed(side, documents, **options)


def test_columns_that_hold_no_tokens(side: Side, rich: Any) -> None:
    for column in ("id", "vector", "text"):
        with pytest.raises(ValueError, match=column):
            packed(side, rich, columns=[column])


def test_a_state_of_another_packing_is_refused(side: Side, documents: Any) -> None:
    state = packed(side, documents)[0].state_dict()
    for name, value in {"pack_sequences": 9, "eos_id": 3, "pad_id": 3, "blocks_per_epoch": 44, "epoch": 1}.items():
        with pytest.raises(ValueError, match=name):
            packed(side, documents, state=state, **{name: value})
    rows = side.one(documents)
    with pytest.raises(ValueError, match=r"pack"):
        rows.load_state_dict(saved(state))
    with pytest.raises(ValueError, match=r"pack"):
        packed(side, documents)[0].load_state_dict(saved(rows.state_dict()))
    with pytest.raises(ValueError, match=r"pack"):
        side.dataset.merge_state_dicts([state, rows.state_dict()])
