"""``explain``: what it says of a step is what the replicas are handed."""

from __future__ import annotations

import base64
import doctest
import json
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from checkpoints import run
from conftest import Tables, rows_from

from ray_lance_stream import LanceStream, explaining
from ray_lance_stream.checkpoint import locate, write_streams
from ray_lance_stream.errors import ConfigError, StateMismatchError
from ray_lance_stream.explaining import StepRows, rows_of_step
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import global_batches


def column(found: StepRows, name: str) -> list[Any]:
    values: list[Any] = found.places.column(name).to_pylist()
    return values


ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "clumps": {"shuffle_clump_size": 5, "shuffle_seed": 2**64 - 1},
    "filtered": {"filter": "id % 3 != 1"},
    "whole steps": {"drop_last": True},
    "one split": {"num_splits": 1, "global_batch_size": 7},
}


@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_every_step_is_what_is_delivered(tables: Tables, options: dict[str, Any]) -> None:
    stream = tables.stream(50, **options)
    batches = global_batches(stream, epoch_count=2)
    assert {batch.epoch for batch in batches} == {0, 1}
    for batch in batches:
        found = rows_of_step(stream, batch.step, epoch=batch.epoch, columns=["id", "text"])
        assert found.columns is not None
        assert found.columns.column("id").to_pylist() == batch.columns["id"].tolist()
        assert found.columns.column("text").to_pylist() == list(batch.columns["text"])
        assert column(found, "row") == batch.columns["id"].tolist(), "an id is a row number in these tables"
        assert column(found, "index") == list(range(found.num_rows))
        assert (found.epoch, found.step) == (batch.epoch, batch.step)
        assert found.num_steps == len(batches) // 2
        cycles, splits = found.cycles, stream.config.order.num_splits
        assert column(found, "position") == [cycle for cycle in cycles for _ in range(splits)]
        assert column(found, "split") == list(range(splits)) * len(cycles)
        assert batch.state["samples_consumed_per_split"] == [cycles.stop] * splits


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranks_are_those_that_get_the_rows(tables: Tables, world_size: int) -> None:
    stream = tables.stream(50)
    shards = [stream.open(rank=rank, world_size=world_size) for rank in range(world_size)]
    for rank, shard in enumerate(shards):
        with shard:
            for batch in shard.iter_batches():
                whole = rows_of_step(stream, shard.step, world_size=world_size)
                own = rows_of_step(stream, shard.step, world_size=world_size, rank=rank, columns=["id"])
                assert own.columns is not None
                assert own.columns.column("id").to_pylist() == batch["id"].tolist()
                assert own.num_rows == len(batch["id"])
                assert column(own, "rank_index") == list(range(own.num_rows))
                assert set(column(own, "rank")) == {rank}
                mine = [row for row in whole.places.to_pylist() if row["rank"] == rank]
                assert mine == own.places.to_pylist()


def test_deleted_rows_shift_the_numbers(tables: Tables) -> None:
    uri, table = tables.own(50)
    table.delete("id % 7 = 2")
    stream = tables.stream(uri=uri)
    for batch in global_batches(stream):
        found = rows_of_step(stream, batch.step, columns=["id"])
        assert found.columns is not None
        assert found.columns.column("id").to_pylist() == batch.columns["id"].tolist() != column(found, "row")


def test_a_state_moves_the_question_to_its_table_version(tables: Tables) -> None:
    uri, table = tables.own(50)
    before = global_batches(tables.stream(uri=uri))
    table.add(rows_from(50, 30))
    stream = tables.stream(uri=uri)
    for batch in before:
        found = rows_of_step(stream, batch.step, state=before[0].state)
        assert column(found, "row") == batch.columns["id"].tolist()
    assert column(rows_of_step(stream, 1), "row") != before[0].columns["id"].tolist()
    with pytest.raises(StateMismatchError, match="shuffle_seed"):
        rows_of_step(tables.stream(uri=uri, shuffle_seed=8), 1, state=before[0].state)


def test_a_limit_reads_no_more(tables: Tables) -> None:
    stream = tables.stream(50)
    whole, part = rows_of_step(stream, 2, columns=["id"]), rows_of_step(stream, 2, columns=["id"], limit=3)
    assert whole.columns is not None and part.columns is not None
    assert part.places == whole.places.slice(0, 3) and part.columns == whole.columns.slice(0, 3)
    assert part.num_rows == whole.num_rows == 8
    assert rows_of_step(stream, 2, limit=100).places == whole.places


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"step": 0}, "step"),
        ({"step": 7}, "step"),
        ({"step": 1, "epoch": -1}, "epoch"),
        ({"step": 1, "rank": 0}, "rank"),
        ({"step": 1, "rank": 2, "world_size": 2}, "dp_rank"),
        ({"step": 1, "world_size": 0}, "dp_size"),
        ({"step": 1, "world_size": 5}, "more replicas than splits"),
        ({"step": 1, "limit": 0}, "limit"),
        ({"step": 1, "columns": ["ids"]}, "ids"),
    ],
)
def test_what_does_not_exist_is_refused(tables: Tables, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rows_of_step(tables.stream(48), **options)


# --- the command -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tables: Tables, tmp_path: Path) -> str:
    """A checkpoint of the second epoch of a stream with a filter, beside that of another stream."""
    stream = tables.stream(50, filter="id < 45", shuffle_clump_size=2)
    state = StreamState.from_dict(global_batches(stream, 3, epoch_count=2)[-2].state)
    other = StreamState.from_dict(global_batches(tables.stream(50))[0].state)
    write_streams(*locate(tmp_path), {"train": state, "validation": other})
    return str(tmp_path)


def test_json_from_a_checkpoint(tables: Tables, checkpoint: str) -> None:
    stream = tables.stream(50, filter="id < 45", shuffle_clump_size=2)
    batches = [batch for batch in global_batches(stream, epoch_count=2) if batch.epoch == 1]
    for batch in batches:
        done = run(
            *("explain", tables.uri(50), "t", "--step", batch.step, "--checkpoint", checkpoint, "--name", "train"),
            *("--global-batch-size", 8, "--columns", "text,id", "--json"),
        )
        assert (done.exit_code, done.stderr) == (0, "")
        said = json.loads(done.stdout)
        assert [row["columns"]["id"] for row in said["rows"]] == batch.columns["id"].tolist()
        assert [list(row["columns"]) for row in said["rows"]] == [["text", "id"]] * len(batch.columns["id"])
        found = rows_of_step(stream, batch.step, epoch=1)
        places = [{key: value for key, value in row.items() if key != "columns"} for row in said["rows"]]
        assert places == found.places.to_pylist()
        identity = stream.config.identity
        assert {key: said[key] for key in said if key != "rows"} == {
            "table_version": identity.version,
            "table_fingerprint": identity.fingerprint,
            "epoch": 1,
            "step": batch.step,
            "num_steps": len(batches),
            "cycles": [found.cycles.start, found.cycles.stop],
            "num_rows": found.num_rows,
            "skipped": False,
        }


def test_json_from_options(tables: Tables) -> None:
    stream = tables.stream(50, filter="id != 3", shuffle_clump_size=3, shuffle_seed=11, drop_last=True)
    done = run(
        *("explain", tables.uri(50), "t", "--step", 2, "--epoch", 4, "--num-splits", 4, "--global-batch-size", 8),
        *("--filter", "id != 3", "--shuffle-clump-size", 3, "--shuffle-seed", 11, "--drop-last"),
        *("--world-size", 3, "--rank", 2, "--json"),
    )
    found = rows_of_step(stream, 2, epoch=4, world_size=3, rank=2)
    said = json.loads(done.stdout)
    assert said["rows"] == found.places.to_pylist()
    assert (said["num_rows"], said["num_steps"]) == (4, 6)
    plain = run(
        *("explain", tables.uri(50), "t", "--step", 1, "--num-splits", 4, "--global-batch-size", 8, "--no-shuffle"),
        "--json",
    )
    assert [row["row"] for row in json.loads(plain.stdout)["rows"]] == [0, 12, 24, 36, 1, 13, 25, 37]


def test_the_text(tables: Tables) -> None:
    done = run(
        *("explain", tables.uri(50), "t", "--step", 1, "--num-splits", 4, "--global-batch-size", 8, "--no-shuffle"),
        *("--world-size", 3, "--columns", "text,x", "--limit", 5),
    )
    assert done.stdout.splitlines() == [
        "t, version 2, epoch 0",
        "step 1 of 6: 8 rows (cycles 0 to 1)",
        "",
        "  index  split  position  row  rank  in its batch  text    x",
        "      0      0         0    0     0             0  row 0   [0, 0.25, 0.5]",
        "      1      1         0   12     1             0  row 12  [12, 12.25, 12.5]",
        "      2      2         0   24     2             0  row 24  [24, 24.25, 24.5]",
        "      3      3         0   36     2             1  row 36  [36, 36.25, 36.5]",
        "      4      0         1    1     0             1  row 1   [1, 1.25, 1.5]",
        "  ... 3 more rows (--limit 8 shows all)",
    ]


def test_the_text_is_cut_to_the_terminal(tables: Tables) -> None:
    arguments = ("explain", tables.uri(50), "t", "--step", 6, "--num-splits", 4, "--global-batch-size", 8)
    done = run(*arguments, "--columns", "text,x", columns=50)
    assert done.exit_code == 0 and all(len(line) <= 50 for line in done.stdout.splitlines())
    assert "..." in done.stdout


def test_values_of_every_kind(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "image": [b"\x00\xff" * 40, b""],
            "score": [float("nan"), 0.125],
            "when": pa.array([0, None], pa.timestamp("s")),
            "tags": [["a", "b", "c", "d", "e"], []],
            "meta": [{"k": 1}, None],
            "text": ["\x1b[31mred", "line\nbreak"],
        }
    )
    lancedb.connect(str(tmp_path)).create_table("t", rows)
    arguments = ("explain", tmp_path, "t", "--step", 1, "--num-splits", 1, "--global-batch-size", 2, "--no-shuffle")
    wanted = ("--columns", "image,score,when,tags,meta,text")
    text = run(*arguments, *wanted, columns=200)
    assert "\x1b" not in text.stdout and "\\x1b[31mred" in text.stdout and "line\\nbreak" in text.stdout
    assert "<80 bytes>" in text.stdout and "[5 values: a, b, c, d, ...]" in text.stdout
    assert len(text.stdout.splitlines()) == 6
    said = json.loads(run(*arguments, *wanted, "--json").stdout, parse_constant=pytest.fail)
    assert [row["columns"] for row in said["rows"]] == [
        {
            "image": base64.b64encode(b"\x00\xff" * 40).decode(),
            "score": None,
            "when": "1970-01-01 00:00:00",
            "tags": ["a", "b", "c", "d", "e"],
            "meta": {"k": 1},
            "text": "\x1b[31mred",
        },
        {"image": "", "score": 0.125, "when": None, "tags": [], "meta": None, "text": "line\nbreak"},
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--step", 1), "--checkpoint and --num-splits"),
        (("--step", 1, "--num-splits", 4, "--rank", 0), "--world-size"),
        (("--step", 1, "--num-splits", 4, "--columns", "id,,x"), "separated by commas"),
        (("--step", 0, "--num-splits", 4), "Expected: an integer from 1 to 6"),
        (("--step", 16, "--num-splits", 4), "step 16 is step 4 of epoch 2"),
        (("--step", 1, "--num-splits", 4, "--epoch", 2**63), "epoch is not valid"),
        (("--step", 1, "--num-splits", 5), "pass 5 or 10"),
        (("--step", 1, "--num-splits", 4, "--filter", "nothing = 1"), "filter 'nothing = 1' does not work"),
        (("--step", 1, "--num-splits", 4, "--version", 77), "version 77"),
        (("--step", 1, "--num-splits", 4, "--checkpoint", "nowhere"), "--checkpoint and --num-splits"),
        (("--step", 1, "--checkpoint", "nowhere"), "nowhere does not exist"),
        (("--step", 1, "--checkpoint", "nowhere", "--shuffle-seed", 0), "leave their options out"),
    ],
)
def test_mistakes_are_told_in_one_line(tables: Tables, options: tuple[object, ...], named: str) -> None:
    done = run("explain", tables.uri(50), "t", "--global-batch-size", 8, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_which_stream_must_be_clear(tables: Tables, checkpoint: str) -> None:
    arguments = ("explain", tables.uri(50), "t", "--step", 1, "--global-batch-size", 8, "--checkpoint", checkpoint)
    done = run(*arguments)
    assert done.exit_code == 2 and "['train', 'validation']" in done.stderr and "--name" in done.stderr
    done = run(*arguments, "--name", "test")
    assert done.exit_code == 2 and "no stream 'test'" in done.stderr


def test_the_table_of_the_checkpoint_or_none(tables: Tables, checkpoint: str) -> None:
    options = ("--step", 1, "--global-batch-size", 8, "--checkpoint", checkpoint, "--name", "train")
    done = run("explain", tables.uri(48), "t", *options)
    assert (done.exit_code, done.stdout) == (2, "") and "table differs" in done.stderr


def test_a_transform_is_not_run(tables: Tables) -> None:
    """The documented way: a stream at hand, a step from the log; rows as they stand in the table."""
    stream: LanceStream = tables.stream(50, transform=lambda batch: {"id": np.array(batch["id"]) + 1})
    delivered = global_batches(stream, 2)[3]
    found = rows_of_step(stream, 4, columns=["id"])
    assert found.columns is not None
    assert (found.columns.column("id").to_numpy() + 1).tolist() == delivered.columns["id"].tolist()


def test_the_example_in_the_module() -> None:
    assert doctest.testmod(explaining) == (0, 9)
