"""The README says what is so: its snippets compile and name what exists, and what it quotes is what is printed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import run
from conftest import Tables

import ray_lance_stream
from ray_lance_stream import LanceStream, PrefetchConfig, StreamDataConfig, StreamShard
from ray_lance_stream.config import POOL_LABEL

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


PYTHON = [ast.parse(block) for block in blocks("python")]  # each compiles
CALLS = [node for tree in PYTHON for node in ast.walk(tree) if isinstance(node, ast.Call)]


def calls(name: str) -> list[ast.Call]:
    """Calls of a function or method in the snippets, by its last name."""
    found = [
        c for c in CALLS if name == (c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", ""))
    ]
    assert found, f"the README does not call {name}"
    return found


def test_imports_name_what_exists() -> None:
    imports = [node for tree in PYTHON for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert any(node.module == "ray_lance_stream" for node in imports)
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("LanceStream", LanceStream.__init__),
        ("open", LanceStream.open),
        ("StreamDataConfig", StreamDataConfig.__init__),
        ("iter_torch_batches", StreamShard.iter_torch_batches),
        ("load_state_dict", StreamShard.load_state_dict),
        ("state_dict", StreamShard.state_dict),
        ("report", ray_lance_stream.report),
    ],
)
def test_calls_take_their_arguments(name: str, function: Callable[..., Any]) -> None:
    takes = inspect.signature(function)
    for call in calls(name):
        keywords = {str(keyword.arg): None for keyword in call.keywords}
        bound = [None] * (len(call.args) + (function.__qualname__ != function.__name__))  # methods get self
        takes.bind(*bound, **keywords)


def test_attributes_of_the_shard_exist(tables: Tables) -> None:
    named = {
        node.attr
        for tree in PYTHON
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shard"
    }
    named |= set(re.findall(r"`shard\.(\w+)", TEXT))
    assert {"epoch", "step", "loss_scale", "dropped_rows"} <= named
    with tables.stream(20).open() as shard:
        assert [name for name in sorted(named) if not hasattr(shard, name)] == []


def test_arguments_in_the_text_exist() -> None:
    """Names in the text such as `drop_last=True` or `PrefetchConfig(idle_timeout_s=60)` are parameters of something."""
    faces: list[Callable[..., Any]] = [LanceStream, PrefetchConfig, StreamDataConfig, StreamShard.iter_batches]
    parameters = {name for face in faces for name in inspect.signature(face).parameters}
    in_text = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`(?:\w+\()?(\w+)=", in_text)) - set(POOL_LABEL)
    assert {"drop_last", "idle_timeout_s", "on_transform_error", "plan"} <= named
    assert named <= parameters


def test_the_transform_shown_makes_rows() -> None:
    function = next(node for node in PYTHON[0].body if isinstance(node, ast.FunctionDef) and node.name == "decode")
    names: dict[str, Any] = {"np": np}
    exec(compile(ast.Module([function], []), "README.md", "exec"), names)
    pixels = np.arange(2 * 3 * 64 * 64).astype(np.uint8).reshape(2, 3, 64, 64)
    made = names["decode"](pa.record_batch({"image": [image.tobytes() for image in pixels], "label": [4, 2]}))
    assert np.array_equal(made["image"], pixels) and made["label"].to_pylist() == [4, 2]


@pytest.mark.thorough
def test_quoted_output_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the console blocks, on the table that the main job writes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    digits = importlib.import_module("train_digits")
    try:
        monkeypatch.chdir(tmp_path)
        digits.write_table("output/digits/db", "digits")
        sessions = "".join(blocks("console")).replace("\\\n", " ").split("$ ")[1:]
        assert len(sessions) > 1
        for session in sessions:
            command, quoted = session.split("\n", 1)
            program, *arguments = shlex.split(command)
            done = run(*arguments)
            assert (program, done.exit_code, done.stderr) == ("ray-lance-stream", 0, "")
            parts = re.split(r"^\.\.\.\n", quoted, flags=re.MULTILINE)  # between them something is left out
            assert done.stdout.startswith(parts[0]) and (len(parts) > 1 or done.stdout == quoted)
            end = 0
            for part in parts:
                assert part in done.stdout[end:]
                end = done.stdout.index(part, end) + len(part)
    finally:
        sys.modules.pop("train_digits", None)


def test_the_marked_commands_are_found_by_ci() -> None:
    marks = re.findall(r"^<!-- run: (\S+) -->\n```bash\n(.+)\n```$", TEXT, flags=re.MULTILINE)
    assert [name for name, _ in marks] == ["main-job", "tests"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(name in ci for name, _ in marks)
    assert "examples/train_digits.py" in dict(marks)["main-job"] and "pytest" in dict(marks)["tests"]


@pytest.mark.long
@pytest.mark.slow
def test_the_benchmark_that_its_figures_are_from(tmp_path: Path) -> None:
    (command,) = [block for block in blocks("bash") if "epoch_rate.py" in block]
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    small = [
        "--scale",
        "0.01",
        "--repeats",
        "1",
        "--contenders",
        "bare",
        "ours, in process",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, *arguments, *small], cwd=ROOT, capture_output=True, text=True, check=True)
    for title in ("(a) shuffled by row", "(a) shuffled by clump 64"):
        assert title in done.stdout
    results = json.loads((tmp_path / "epoch_rate.json").read_text())
    assert {run["rows"] for found in results.values() for run in found["ours, in process"]} == {4992}
    assert (tmp_path / "epoch_rate.png").exists()
