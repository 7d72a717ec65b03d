"""The how-tos: every snippet is run and gives what it shows, and every command works."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import shlex
import warnings
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from checkpoints import run

import ray_lance_stream.howto

PAGES = [page.name for page in pkgutil.iter_modules(ray_lance_stream.howto.__path__)]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A database whose table "images" has 10,000 rows."""
    ids = np.arange(10_000)
    columns = {"id": ids, "value": np.sqrt(ids)}
    lancedb.connect(tmp_path / "db").create_table("images", pa.table(columns))
    return str(tmp_path / "db")


def text_of(page: str) -> str:
    return importlib.import_module(f"ray_lance_stream.howto.{page}").__doc__ or ""


def test_the_list_names_every_page() -> None:
    listed = re.findall(r'help\("ray_lance_stream\.howto\.(\w+)"\)', ray_lance_stream.howto.__doc__ or "")
    assert sorted(listed) == sorted(PAGES) and len(PAGES) == 7
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert "ray_lance_stream.howto" in readme


@pytest.mark.parametrize("page", PAGES)
def test_snippets_give_what_they_show(page: str, uri: str) -> None:
    test = doctest.DocTestParser().get_doctest(text_of(page), {"uri": uri}, page, None, 0)
    assert test.examples, "a page without a snippet"
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_not_run_compiles(page: str) -> None:
    """Indented code that stands for a whole script."""
    for block in re.findall(r"(?:^ {4}\S.*\n(?:^(?: {4}.*)?\n)*)", text_of(page), flags=re.MULTILINE):
        if not block.lstrip().startswith("$"):
            ast.parse(re.sub(r"^ {4}", "", block, flags=re.MULTILINE))


def test_commands_work(uri: str) -> None:
    found = [line for page in PAGES for line in re.findall(r"^ +\$ (.*)$", text_of(page), flags=re.MULTILINE)]
    assert found
    for line in found:
        program, *arguments = shlex.split(line.replace("URI", uri))
        done = run(*arguments)
        assert (program, done.exit_code) == ("ray-lance-stream", 0), done.stderr
