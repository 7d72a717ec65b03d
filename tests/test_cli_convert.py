"""``convert``: checkpoints and state dicts in each other's form, and a run that goes on from either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import drifted, run, saved, state_at, state_of
from conftest import Tables
from lancedb.streaming import StreamingDataset as LanceDBDataset

from ray_lance_stream import LanceStream
from ray_lance_stream.checkpoint import FILE_NAME, Streams, locate, read_streams
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import global_batches


def read(place: Path) -> Streams | None:
    return read_streams(*locate(place))


def by_rank(directory: Path, stamp: tuple[int, int] = (1700000000, 4)) -> StreamState:
    """Writes what three ranks save by themselves, and an older file of a fourth; returns what they make together."""
    for rank in range(3):
        counts = [6 if split == rank else 5 for split in range(3)]
        saved(directory, drifted(counts, counts), rank=rank, stamp=stamp)
    saved(directory, drifted([2, 2, 2], [2, 2, 2]), rank=3, stamp=(stamp[0], stamp[1] - 1))
    return drifted([6, 6, 6], [6, 6, 6])


def test_ranks_are_merged_in_place(tmp_path: Path) -> None:
    merged = by_rank(tmp_path)
    done = run("convert", tmp_path, tmp_path, "--to", "checkpoint")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"wrote {tmp_path}/{FILE_NAME}\n  train: epoch 1, 18 rows consumed\n"
    assert read(tmp_path) == {"train": merged}
    content = json.loads((tmp_path / FILE_NAME).read_text())
    assert content["stamp"] == [1700000000, 4], "else the files of the ranks would count"
    for rank in range(4):
        (tmp_path / f"lance_stream.rank-0000{rank}.json").unlink()
    assert read(tmp_path) == {"train": merged}
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_ranks_are_merged_elsewhere(tmp_path: Path) -> None:
    merged = by_rank(tmp_path / "in")
    for out in (tmp_path / "new" / "directory", tmp_path / "named" / FILE_NAME):
        assert run("convert", tmp_path / "in", out, "--to", "checkpoint").exit_code == 0
        assert read(out) == {"train": merged}
    assert (tmp_path / "named" / FILE_NAME).is_file()


def test_there_and_back(tmp_path: Path) -> None:
    states: Streams = {"train": drifted([5, 5, 6], [5, 8, 6]), "validation": state_at(0, filter="é > '\"'")}
    saved(tmp_path / "in", states)
    for name, state in states.items():
        file, back = tmp_path / f"{name}.json", tmp_path / f"back-{name}"
        done = run("convert", tmp_path / "in", file, "--to", "state-dict", "--name", name)
        assert done.exit_code == 0 and done.stdout.startswith(f"wrote {file}\n  {name}: epoch 1, ")
        assert json.loads(file.read_text()) == state.to_dict()
        assert run("convert", file, back, "--to", "checkpoint", "--name", name).exit_code == 0
        assert read(back) == {name: state}
    assert run("convert", tmp_path / "train.json", tmp_path / "default", "--to", "checkpoint").exit_code == 0
    assert read(tmp_path / "default") == {"train": states["train"]}
    assert run("convert", tmp_path / "in", tmp_path / "one", "--to", "checkpoint", "--name", "train").exit_code == 0
    assert read(tmp_path / "one") == {"train": states["train"]}
    assert run("convert", tmp_path / "in", tmp_path / "all", "--to", "checkpoint").exit_code == 0
    assert read(tmp_path / "all") == states


def test_a_run_goes_on_from_what_was_written(tables: Tables, tmp_path: Path) -> None:
    stream = tables.stream(50)
    batches = global_batches(stream, 2)
    saved(tmp_path / "in", state_of(batches[2]))
    assert run("convert", tmp_path / "in", tmp_path / "state.json", "--to", "state-dict").exit_code == 0
    assert run("convert", tmp_path / "state.json", tmp_path / "out", "--to", "checkpoint").exit_code == 0
    for resume_from in (str(tmp_path / "out"), json.loads((tmp_path / "state.json").read_text())):
        rest = global_batches(tables.stream(50, resume_from=resume_from), 3)
        assert [batch.columns["id"].tolist() for batch in rest] == [b.columns["id"].tolist() for b in batches[3:]]


def test_a_state_of_lancedb_is_told_what_it_belongs_to(tables: Tables, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_splits": 4, "filter": "id % 3 != 0", "shuffle_seed": 5, "shuffle_clump_size": 2}
    uri, table = tables.own(100)
    theirs = LanceDBDataset(table, **options)
    rows = iter(theirs)
    for _ in range(12):
        next(rows)
    (tmp_path / "lancedb.json").write_text(json.dumps(theirs.state_dict()))
    rest = [row["id"] for row in rows]
    table.add(table.search().limit(3).to_arrow())
    refused = run("inspect", tmp_path / "lancedb.json")
    assert refused.exit_code == 2 and "with --uri and --table" in refused.stderr
    place = ("--uri", uri, "--table", "t", "--version", table.version - 1)
    of = ("--filter", options["filter"], "--shuffle-clump-size", 2)
    assert run("inspect", tmp_path / "lancedb.json", *of).exit_code == 2
    ours = saved(tmp_path / "ours", state_at(7))
    for command in (("inspect", ours), ("convert", ours, tmp_path / "c", "--to", "checkpoint")):
        refused = run(*command, *place, *of)
        assert refused.exit_code == 2 and "this one says what it belongs to" in refused.stderr
    shown = run("inspect", tmp_path / "lancedb.json", *place, *of, "--global-batch-size", 4)
    assert (shown.exit_code, "step 3 of 16 finished" in re.sub(" +", " ", shown.stdout)) == (0, True), shown.output
    done = run("convert", tmp_path / "lancedb.json", tmp_path / "out", "--to", "checkpoint", *place, *of)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "  train: epoch 0, 12 rows consumed")
    assert run("inspect", tmp_path / "out").exit_code == 0
    stream = LanceStream(
        uri,
        "t",
        version=table.version - 1,
        global_batch_size=4,
        order="lancedb",
        resume_from=tmp_path / "out",
        **options,
    )
    assert [row for batch in global_batches(stream) for row in batch.columns["id"].tolist()] == rest
    assert run("convert", tmp_path / "lancedb.json", tmp_path / "b", "--to", "checkpoint", *of).exit_code == 2


def test_nothing_is_replaced_without_force(tmp_path: Path) -> None:
    saved(tmp_path / "in", state_at(7))
    old = saved(tmp_path / "out", state_at(3), stamp=(9, 9))
    (tmp_path / "state.json").write_text("{}")
    for out, kind in ((old, "checkpoint"), (tmp_path / "state.json", "state-dict"), (tmp_path / "in", "checkpoint")):
        done = run("convert", tmp_path / "in", out, "--to", kind)
        assert (done.exit_code, done.stdout) == (2, "") and "--force" in done.stderr
    assert read(old) == {"train": state_at(3)} and (tmp_path / "state.json").read_text() == "{}"
    assert run("convert", tmp_path / "in", old, "--to", "checkpoint", "--force").exit_code == 0
    assert run("convert", tmp_path / "in", tmp_path / "state.json", "--to", "state-dict", "--force").exit_code == 0
    assert read(old) == {"train": state_at(7)}
    assert json.loads((tmp_path / "state.json").read_text()) == state_at(7).to_dict()


def test_force_wins_over_newer_files_of_ranks(tmp_path: Path) -> None:
    by_rank(tmp_path / "out")
    saved(tmp_path / "in", state_at(7))
    done = run("convert", tmp_path / "in", tmp_path / "out", "--to", "checkpoint")
    assert done.exit_code == 2 and "lance_stream.rank-00000.json" in done.stderr
    assert run("convert", tmp_path / "in", tmp_path / "out", "--to", "checkpoint", "--force").exit_code == 0
    assert read(tmp_path / "out") == {"train": state_at(7)}


def test_force_replaces_a_damaged_file(tmp_path: Path) -> None:
    saved(tmp_path / "in", state_at(7))
    (tmp_path / "out").mkdir()
    for content in ("", "[]", '{"stamp": 3}', '{"stamp": [1, "x"]}'):
        (tmp_path / "out" / FILE_NAME).write_text(content)
        assert run("convert", tmp_path / "in", tmp_path / "out", "--to", "checkpoint", "--force").exit_code == 0
        assert read(tmp_path / "out") == {"train": state_at(7)}


def test_ranks_that_do_not_fit_together_are_not_merged(tmp_path: Path) -> None:
    saved(tmp_path, state_at(7), rank=0)
    saved(tmp_path, state_at(8), rank=1)
    done = run("convert", tmp_path, tmp_path, "--to", "checkpoint")
    assert (done.exit_code, done.stdout) == (2, "") and "different numbers of cycles" in done.stderr
    assert not (tmp_path / FILE_NAME).exists()


MISTAKES: list[tuple[str, tuple[Any, ...], str]] = [
    ("file.json", ("--to", "checkpoint"), "OUT is not a directory"),
    ("in", ("--to", "state-dict", "--name", "train"), "OUT is a directory"),
    ("missing/state.json", ("--to", "state-dict", "--name", "train"), "missing/state.json"),
    ("state.json", ("--to", "state-dict"), "['train', 'validation']"),
    ("state.json", ("--to", "state-dict", "--name", "test"), "no stream 'test'"),
    ("out", (), "Missing option '--to'"),
    ("out", ("--to", "pickle"), "'pickle' is not one of"),
]


@pytest.mark.parametrize(("out", "options", "named"), MISTAKES)
def test_mistakes(tmp_path: Path, out: str, options: tuple[Any, ...], named: str) -> None:
    saved(tmp_path / "in", {"train": state_at(), "validation": state_at()})
    before = sorted(tmp_path.rglob("*"))
    done = run("convert", tmp_path / "in", tmp_path / out, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
