"""Documents, tables of them, and their blocks, for the tests of packing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import torch

from ray_lance_stream import StreamingDataset, merge_state_dicts

SPLITS, T, EOS, PAD = 4, 8, 1, 2
PACKED: dict[str, Any] = {
    "num_splits": SPLITS,
    "columns": ["tokens"],
    "pack_sequences": T,
    "eos_id": EOS,
    "pad_id": PAD,
    "blocks_per_epoch": 40,
    "shuffle_seed": 5,
}
Block = tuple[list[int], list[int]]
LENGTHS = [(d * 7) % 13 for d in range(61)]
DOCUMENTS = [[100 * d + 100 + t for t in range(length)] for d, length in enumerate(LENGTHS)]


def table_of(path: Path, documents: list[Any]) -> Any:
    """A table in two fragments, whose row d is document d."""
    ids = pa.array(range(len(documents)))
    rows = pa.table({"id": ids, "tokens": pa.array(documents, pa.list_(pa.int32()))})
    table = lancedb.connect(str(path)).create_table("t", rows.slice(0, len(documents) // 2))
    table.add(rows.slice(len(documents) // 2))
    return table


def with_holes() -> list[Any]:
    """The documents, with every seventh one null and every eleventh one holding a null."""
    documents: list[Any] = list(DOCUMENTS)
    documents[3::7] = [None] * len(documents[3::7])
    documents[5::11] = [[9, None]] * len(documents[5::11])
    return documents


def ranks(table: Any, world_size: Any = 1, state: Any = None, **options: Any) -> list[StreamingDataset]:
    """The datasets of all ranks, from a state on if there is one."""
    datasets = [
        StreamingDataset(table, rank=rank, world_size=world_size, **PACKED | options) for rank in range(world_size)
    ]
    for dataset in datasets:
        if state is not None:
            dataset.load_state_dict(state)
    return datasets


def taken(blocks: Iterable[Any], count: int | None = None) -> list[Block]:
    """Takes some blocks, or all, checking their form."""
    found = list(itertools.islice(blocks, count))
    for block in found:
        assert list(block) == ["input_ids", "doc_ids"]
        assert {(tensor.dtype, tensor.shape) for tensor in block.values()} == {(torch.int64, (T,))}
    return [(block["input_ids"].tolist(), block["doc_ids"].tolist()) for block in found]


def cycles_of(datasets: list[StreamingDataset], cycles: int | None = None) -> list[Block]:
    """Takes some cycles, or all that are left, of all ranks, and returns the blocks in the one order."""
    shares = []
    for dataset in datasets:
        width = len(dataset.owned_splits)
        blocks = taken(dataset, None if cycles is None else cycles * width)
        assert len(blocks) % width == 0
        shares.append([blocks[i : i + width] for i in range(0, len(blocks), width)])
    return [block for turn in zip(*shares, strict=True) for share in turn for block in share]


def saved(datasets: list[StreamingDataset]) -> dict[str, Any]:
    """The state of all ranks, as it comes back from a file."""
    merged = merge_state_dicts([json.loads(json.dumps(dataset.state_dict())) for dataset in datasets])
    assert json.loads(json.dumps(merged)) == merged
    return merged
