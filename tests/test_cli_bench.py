"""``ray-lance-stream bench``: rates of a real table, and of a transform from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import run
from conftest import Tables


def test_it_reads_all_of_a_small_table(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("benched.py").write_text("def same(batch):\n    return batch\n")
    arguments = (
        "bench",
        tables.uri(50),
        "t",
        "--num-splits",
        4,
        "--global-batch-size",
        8,
        "--transform",
        "benched:same",
    )
    done = run(*arguments, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    rates = json.loads(done.stdout)["rates"]
    assert [rate["what"] for rate in rates] == [
        "bare reader, in order",
        "stream, shuffled",
        "stream, with the transform",
    ]
    assert [rate["rows"] for rate in rates] == [50, 48, 48], "the stream leaves out what fills no cycle"
    for rate in rates:
        assert rate["rows_per_s"] == pytest.approx(rate["rows"] / rate["seconds"])
        assert 0 < rate["first_s"] <= rate["seconds"] and rate["num_bytes"] > rate["rows"] * 20
    shown = run(*arguments)
    assert shown.exit_code == 0 and "bare reader, in order" in shown.stdout and " 48\n" in shown.stdout


def test_a_transform_that_is_not_there(tables: Tables) -> None:
    done = run("bench", tables.uri(50), "t", "--num-splits", 4, "--global-batch-size", 8, "--transform", "json:nothing")
    assert done.exit_code == 2 and "the transform cannot be imported" in done.stderr and "nothing" in done.stderr
    assert run("bench", tables.uri(50), "t", "--transform", "json").exit_code == 2
