"""Blocks that are built around rows that kill their readers: as if these had failed, but never touched."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from conftest import Tables

from ray_lance_stream import ReplaceRow, TransformError
from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.location import TableRef
from ray_lance_stream.plan import OrderSpec, PlanSpec
from ray_lance_stream.request import Ranges
from ray_lance_stream.sifting import ErrorPolicy, Sifted, SkippedRow
from ray_lance_stream.transform import RowTransform, Transform

ROWS, SPLITS = 50, 4  # splits of 12 rows; without shuffling split s holds rows 12 * s and on
RANGES = Ranges(first_split=1, num_splits=2, start=2, stop=6, overrides=((2, 4, 7),))
DEADLY = frozenset({15, 29, 30})  # (1, 3), (2, 5), (2, 6)
FAILING = frozenset({16, 28})  # (1, 4), (2, 4)
SKIP, REPLACE = ErrorPolicy("skip"), ErrorPolicy(ReplaceRow({"id": -1, "double": -2}))


class Double:
    """Fails on some rows; rows that it must not be given fail the test."""

    def __init__(self, failing: frozenset[int], untouched: frozenset[int] = frozenset()) -> None:
        self.failing, self.untouched = failing, untouched

    def __call__(self, batch: pa.RecordBatch) -> Any:
        ids: list[Any] = batch["id"].to_pylist()
        if self.untouched & set(ids):
            pytest.exit(f"rows {self.untouched & set(ids)} were read")  # not an error that could be skipped
        if self.failing & set(ids):
            raise ValueError("bad")
        return {"id": ids, "double": [2 * i for i in ids]}


class Pairs(Double):
    """The same, as Python objects."""

    def __call__(self, batch: pa.RecordBatch) -> Any:
        columns = super().__call__(batch)
        return list(zip(columns["id"], columns["double"], strict=True))


def builder_of(tables: Tables, transform: Transform, policy: ErrorPolicy) -> tuple[BlockBuilder, PlanSpec]:
    ref = TableRef(uri=tables.uri(ROWS), name="t")
    opened = ref.open(None)
    recipe = BlockRecipe(table=ref.located(opened), transform=transform, policy=policy)
    order = OrderSpec(num_splits=SPLITS, shuffle=False)
    return BlockBuilder(recipe), PlanSpec(table=opened.identity, order=order, epoch=0)


def place(row: int) -> tuple[int, int]:
    return divmod(row, 12)


def skipped_row(policy: ErrorPolicy, row: int) -> SkippedRow:
    skipped = policy.left_out(ValueError("bad"), row, *place(row))
    assert skipped is not None
    return skipped


def rows_of(block: Sifted) -> list[Any]:
    return block.rows if isinstance(block.rows, list) else block.rows.to_pylist()


@pytest.mark.parametrize("policy", [SKIP, REPLACE], ids=["skip", "replace"])
@pytest.mark.parametrize("deadly", [DEADLY, frozenset({15}), frozenset(range(14, 18)) | frozenset(range(28, 31))])
@pytest.mark.parametrize("kind", [Transform, RowTransform])
def test_a_block_is_as_if_its_deadly_rows_had_failed(
    tables: Tables, policy: ErrorPolicy, deadly: frozenset[int], kind: type[Transform]
) -> None:
    user = Pairs if kind is RowTransform else Double
    builder, spec = builder_of(tables, kind(user(FAILING | deadly)), policy)
    expected, _ = builder.build(builder.open_plan(spec)[0], RANGES, lambda rows: rows)
    builder, spec = builder_of(tables, kind(user(FAILING, deadly)), policy)
    # Opening the plan builds the first rows, these among them: they are left out of those, too.
    rows = [skipped_row(policy, row) for row in deadly]
    handle, _ = builder.open_plan(spec, rows)
    block, _ = builder.build(handle, RANGES, lambda rows: rows, rows)
    assert isinstance(expected, Sifted) and isinstance(block, Sifted)
    assert rows_of(block) == rows_of(expected)
    assert block.splits.tolist() == expected.splits.tolist()
    assert block.positions.tolist() == expected.positions.tolist()
    assert block.skipped == expected.skipped
    assert {row.row_number for row in block.skipped} == {*FAILING, *deadly}
    if not isinstance(block.rows, list):
        assert block.rows.schema == handle.schema


def test_the_first_rows_all_deadly(tables: Tables) -> None:
    """The schema comes from later ones, as where they fail."""
    first = frozenset(12 * split + position for split in range(SPLITS) for position in range(4))
    builder, spec = builder_of(tables, Transform(Double(frozenset(), first)), SKIP)
    handle, _ = builder.open_plan(spec, [skipped_row(SKIP, row) for row in first])
    assert handle.schema.names == ["id", "double"]
    (counted, ranges), _ = builder.count_plan(spec, 1)
    assert counted.num_rows == handle.num_rows
    assert {(s, p) for s, p in zip(*(a.tolist() for a in ranges.places()), strict=True)} == set(map(place, first))
    with pytest.raises(TransformError, match="each of the first"):
        builder.open_plan(spec, [skipped_row(SKIP, row) for row in range(48)])


@pytest.mark.parametrize(
    ("policy", "is_left_out"),
    [("raise", False), ("skip", True), ("warn", True), (ReplaceRow({}), True), (lambda error: "7" in str(error), True)],
)
def test_what_the_policy_says_of_a_deadly_row(tables: Tables, policy: Any, is_left_out: bool) -> None:
    builder, _ = builder_of(tables, Transform(Double(frozenset())), ErrorPolicy(policy))
    row = builder.left_out(ValueError("row 7"), 7, 0, 7)
    assert (row is not None) == is_left_out
    if row is not None:
        assert (row.row_number, row.split, row.position, row.reason) == (7, 0, 7, "ValueError: row 7")


def test_ranges_know_their_rows() -> None:
    held = set(zip(*(a.tolist() for a in RANGES.places()), strict=True))
    assert {(s, p) for s in range(5) for p in range(10) if RANGES.holds(s, p)} == held
