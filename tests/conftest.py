"""Settings and small tables shared by the tests."""

from __future__ import annotations

import os

# Read by Ray when it is imported. Ray 2.60 writes a token file into the home directory otherwise.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how soon Train takes in a report
# Workers import the training loops of the tests. Set here and not in a runtime_env, for which Ray would start
# every process anew instead of taking those it keeps ready.
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from nodes import nodes, one_node

from ray_lance_stream import LanceStream, gone

__all__ = ["nodes", "one_node"]  # fixtures


def rows_from(start: int, count: int) -> pa.Table:
    """Rows whose id is ``start``, ``start + 1``, ...: id, x (three floats), text."""
    ids = np.arange(start, start + count)
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3) + np.tile([0.0, 0.25, 0.5], count)), 3)
    return pa.table({"id": ids, "x": x, "text": [f"row {i}" for i in ids]})


class Tables:
    """Small LanceDB tables in temporary directories, in which a row's id is its row number."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made = 0

    def uri(self, rows: int) -> str:
        """Returns a database whose table "t" has that many rows. Shared: not to be changed."""
        path = self._root / f"shared-{rows}"
        if not path.exists():
            self._create(path, rows)
        return str(path)

    def own(self, rows: int) -> tuple[str, Any]:
        """Returns a new database, and its table "t", which the caller may change."""
        self._made += 1
        path = self._root / f"own-{self._made}"
        return str(path), self._create(path, rows)

    def stream(self, rows: int = 50, *, uri: str | None = None, **options: Any) -> LanceStream:
        """Returns a stream of 4 splits and steps of 8 rows from ``uri``, or from a shared table."""
        settings: dict[str, Any] = {"num_splits": 4, "global_batch_size": 8, "shuffle_seed": 7} | options
        return LanceStream(self.uri(rows) if uri is None else uri, "t", **settings)

    @staticmethod
    def _create(path: Path, rows: int) -> Any:
        # Two fragments: take and filter go over a fragment's edge.
        table = lancedb.connect(str(path)).create_table("t", rows_from(0, rows // 2))
        table.add(rows_from(rows // 2, rows - rows // 2))
        return table


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Makes tables and streams."""
    return Tables(tmp_path_factory.mktemp("tables"))


def stream_threads() -> list[str]:
    """Names of the threads of ours that are alive, but for the one that lives as long as the process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("lance-stream") and name != gone.THREAD]


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """Fails the test if it leaves threads of ours behind that are not gone after a second."""
    before = len(stream_threads())
    yield
    deadline = time.monotonic() + 1
    while len(stream_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(stream_threads()) <= before, stream_threads()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that repeat tests of faults."""
    group = parser.getgroup("faults")
    group.addoption("--times", type=int, default=1, help="run each test of a fault so many times, other seeds each")
    group.addoption("--seed", type=int, default=0, help="the first of these seeds; they say when and where faults come")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as quick what is none of the longer kinds."""
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in ("cluster", "slow", "fault", "thorough")):
            item.add_marker(pytest.mark.quick)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats tests of faults, each time with another ``rng``."""
    times = metafunc.config.getoption("times")
    # Of a test that is one of a fault in some cases only, the others are repeated too, unless -m leaves them out.
    if metafunc.definition.get_closest_marker("fault") is not None or (times > 1 and _has_cases_of_faults(metafunc)):
        if "rng" not in metafunc.fixturenames:
            metafunc.fixturenames.append("rng")
        first = metafunc.config.getoption("seed")
        seeds = range(first, first + times)
        metafunc.parametrize("rng", seeds, indirect=True, ids=[f"seed {seed}" for seed in seeds])


def _has_cases_of_faults(metafunc: pytest.Metafunc) -> bool:
    cases = [case for mark in metafunc.definition.iter_markers("parametrize") for case in mark.args[1]]
    return any(mark.name == "fault" for case in cases for mark in getattr(case, "marks", ()))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Says when and where a fault comes."""
    return random.Random(request.param)
