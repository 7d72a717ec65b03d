"""The command line beside a real run: the checkpoint it reported, the rows its workers logged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from checkpoints import run
from conftest import Tables
from loops import loop
from runs import fit, read_log

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
WORKERS = 3
BATCH = 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def said(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_the_workers_logged(tables: Tables, tmp_path: Path) -> None:
    """Steps before and after the checkpoint, of both epochs, rank by rank and row by row."""
    uri = tables.uri(94)
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120, idle_timeout_s=5)
    stream = tables.stream(94, num_splits=5, global_batch_size=BATCH, filter="id != 50", prefetch=prefetch)
    result = fit(loop, {"train": stream}, WORKERS, tmp_path, micro_batch_size=4, report_at=[[1, 2]])
    assert result.checkpoint is not None
    checkpoint = result.checkpoint.path

    told = said("inspect", checkpoint, "--uri", uri, "--table", "t", "--global-batch-size", BATCH)["streams"]["train"]
    assert told["progress"]["epoch"] == 1 and told["progress"]["rows_consumed"] == 2 * BATCH
    table = told["table"]
    assert (table["step"], table["num_steps"], table["rows_left"], table["dropped_rows"]) == (2, 5, 50, 3)

    entries = [entry for entry in read_log(tmp_path) if "at" in entry]
    assert len(entries) == 2 * table["num_steps"] * WORKERS
    for entry in entries:
        epoch, step = entry["at"]
        rows = said(
            *("explain", uri, "t", "--checkpoint", checkpoint, "--global-batch-size", BATCH, "--columns", "id"),
            *("--epoch", epoch, "--step", step, "--world-size", WORKERS, "--rank", entry["rank"]),
        )["rows"]
        assert [row["columns"]["id"] for row in rows] == entry["ids"]
        assert [row["rank_index"] for row in rows] == list(range(len(entry["ids"])))
