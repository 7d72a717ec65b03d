"""The loader's batches: those of a standard DataLoader over the same rows."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, counts, ids

pytestmark = pytest.mark.thorough

PLAIN = ["id", "small", "half", "flag", "text", "raw", "pair", "vector", "nested"]
Pair = namedtuple("Pair", "id text")


class Rows(IterableDataset[Any]):
    """Rows in memory."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in structure, types and values, tensors included."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        for a, b in itertools.zip_longest(found, expected):
            assert_same(a, b)
    else:
        assert found == expected


@pytest.mark.parametrize("batch_size", [1, 4, 5, 16, 100, None])
def test_batches_are_those_of_a_standard_loader(side: Side, rich: Any, batch_size: int | None) -> None:
    """Numbers of all kinds, strings, bytes, lists, dicts; full and short batches, and single rows."""
    loader = side.loader(side.one(rich, columns=PLAIN), batch_size=batch_size)
    expected = DataLoader(Rows(list(LANCEDB.one(rich, columns=PLAIN))), batch_size=batch_size)
    assert_same(list(loader), list(expected))


@pytest.mark.parametrize(
    "transform",
    [
        lambda batch: [(row["id"], row["text"]) for row in batch.to_pylist()],
        lambda batch: [Pair(row["id"], row["text"]) for row in batch.to_pylist()],
        lambda batch: torch.tensor(batch["id"].to_pylist(), dtype=torch.float16),
        lambda batch: batch["half"].to_numpy(),
        lambda batch: [{"deep": [row["vector"], {"id": row["id"]}]} for row in batch.to_pylist()],
    ],
    ids=["tuples", "named tuples", "tensors", "numpy scalars", "nested"],
)
def test_rows_of_any_kind_are_collated_as_torch_does(side: Side, rich: Any, transform: Any) -> None:
    loader = side.loader(side.one(rich, transform=transform), batch_size=4)
    expected = DataLoader(Rows(list(LANCEDB.one(rich, transform=transform))), batch_size=4)
    assert_same(list(loader), list(expected))


@pytest.mark.parametrize(("column", "kind"), [("missing", TypeError), ("ragged", RuntimeError)])
def test_what_torch_cannot_collate_fails_as_there(side: Side, rich: Any, column: str, kind: type[Exception]) -> None:
    loader = side.loader(side.one(rich, columns=["id", column], shuffle=False), batch_size=8)
    rows = list(LANCEDB.one(rich, columns=["id", column], shuffle=False))
    with pytest.raises(kind) as expected:
        list(DataLoader(Rows(rows), batch_size=8))
    with pytest.raises(kind) as raised:
        list(loader)
    assert str(raised.value) == str(expected.value)


def test_a_collate_fn_gets_the_rows(side: Side, table_of: OpenTable) -> None:
    seen: list[list[int]] = []

    def collate(rows: list[dict[str, Any]]) -> int:
        seen.append([row["id"] for row in rows])
        return len(rows)

    loader = side.loader(side.one(table_of(24), shuffle=False), batch_size=10, collate_fn=collate)
    assert list(loader) == [10, 10, 4]
    assert [i for batch in seen for i in batch] == ids(LANCEDB.one(table_of(24), shuffle=False))


def test_a_standard_loader_in_process_will_do_too(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4)
    assert batch_ids(loader, 2) == [[0, 6, 12, 18], [1, 7, 13, 19]]
    assert counts(dataset.state_dict()) == [2, 2, 2, 2]
