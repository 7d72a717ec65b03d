"""The command line on checkpoints of packed streams: shown where that says something, refused where it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run, saved, state_at, state_of
from packed import DOCUMENTS, PACKED, cycles_of, ranks, table_of

from ray_lance_stream import ConfigError, LanceStream
from ray_lance_stream.explaining import rows_of_step
from ray_lance_stream.testing import global_batches


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(database, table)."""
    path = tmp_path_factory.mktemp("documents")
    return str(path), table_of(path, DOCUMENTS)


def stream_of(source: Any, **options: Any) -> LanceStream:
    return LanceStream(source[0], "t", **{"global_batch_size": 12} | PACKED | options)


def test_inspect_shows_blocks_documents_and_the_packing(source: Any, tmp_path: Path) -> None:
    state = state_of(global_batches(stream_of(source), stop_after=2)[-1])
    directory = saved(tmp_path / "ckpt", state)
    shown = run("inspect", directory, "--global-batch-size", 12, columns=200)
    assert shown.exit_code == 0, shown.output
    documents = sum(cursor.begun for cursor in state.packed or ())
    assert f"24 blocks: 6 of each of 4 splits, from {documents} documents" in shown.output
    assert "2 of 4 finished, with global batches of 12 blocks" in shown.output
    assert "blocks of 8 tokens, 40 in an epoch; eos_id 1, pad_id 2" in shown.output
    short = run("inspect", directory, "--global-batch-size", 12, "--drop-last", columns=200)
    assert "2 of 3 finished" in short.output
    found = json.loads(run("inspect", directory, "--json").stdout)["streams"]["train"]
    assert found["progress"] == {
        "epoch": 0,
        "blocks_consumed": 24,
        "cycles_completed": 6,
        "blocks_per_split": [6],
        "documents_begun": documents,
    }
    assert found["provenance"]["pack_sequences"]["blocks_per_epoch"] == 40


def test_inspect_at_the_end_of_an_epoch(source: Any, tmp_path: Path) -> None:
    directory = saved(tmp_path / "ckpt", state_of(global_batches(stream_of(source))[-1]))
    shown = run("inspect", directory, "--global-batch-size", 12, columns=200)
    assert "4 of 4 finished, with global batches of 12 blocks" in shown.output


def test_what_asks_for_rows_is_refused(source: Any, tmp_path: Path) -> None:
    stream = stream_of(source)
    directory = saved(tmp_path / "ckpt", state_of(global_batches(stream, stop_after=1)[-1]))
    table: list[Any] = ["--uri", source[0], "--table", "t"]
    for command in (
        ["explain", source[0], "t", "--step", 1, "--global-batch-size", 12, "--checkpoint", directory],
        ["inspect", directory, *table],
    ):
        refused = run(*command)
        assert refused.exit_code == 2
        assert "the blocks of packed documents are not rows of the table" in refused.stderr
    with pytest.raises(ConfigError, match=r"not rows of the table.*pack_sequences=8"):
        rows_of_step(stream, 1)


def test_diff_names_what_differs(source: Any, tmp_path: Path) -> None:
    one = global_batches(stream_of(source), stop_after=2)
    first, second = (saved(tmp_path / f"{i}", state_of(batch)) for i, batch in enumerate(one))
    other = saved(tmp_path / "other", state_of(global_batches(stream_of(source, eos_id=3), stop_after=1)[-1]))
    assert run("diff", first, first).exit_code == 0
    shown = run("diff", first, second, columns=200)
    assert shown.exit_code == 1
    assert "blocks_consumed" in shown.output and "pack_sequences" not in shown.output
    assert "eos_id: 3" in run("diff", first, other, columns=200).output
    rows = run("diff", saved(tmp_path / "rows", state_at(3)), first, columns=200)
    assert rows.exit_code == 1 and re.search(r"rows_per_split +3 of each +none", rows.output)


def test_convert_merges_ranks_and_writes_what_the_dataset_reads(source: Any, tmp_path: Path) -> None:
    expected = cycles_of(ranks(source[1]))
    stream, directory = stream_of(source, order="lancedb"), tmp_path / "ckpt"
    for rank in range(3):
        with stream.open(rank=rank, world_size=3) as shard:
            next(iter(shard.iter_batches()))
            saved(directory, {"train": shard.state()}, rank=rank)
    done = run("convert", directory, tmp_path / "state.json", "--to", "state-dict")
    assert done.exit_code == 0, done.output
    assert "epoch 0, 12 blocks consumed" in done.output
    state = json.loads((tmp_path / "state.json").read_text())
    assert cycles_of(ranks(source[1], 2, state)) == expected[12:]
