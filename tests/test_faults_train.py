"""Ray Train runs that lose processes and nodes, and grow and shrink."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import Tables
from loops import loop, until_told
from nodes import Nodes
from runs import delivered, fit, read_log, reference, wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault]
NUM_CPUS = 8


@pytest.mark.usefixtures("one_node")
def test_a_run_in_which_every_kind_of_process_dies(tables: Tables, tmp_path: Path, rng: Random) -> None:
    # Eight steps of 32 rows an epoch, read in blocks of about 50: there is always something to be lost.
    prefetch = PrefetchConfig(block_bytes=1500, max_buffer_bytes=5000, placement_timeout_s=120)
    stream = tables.stream(259, num_splits=8, global_batch_size=32, prefetch=prefetch)
    faults: list[list[Any]] = [
        [0, rng.randrange(1, 4), rng.randrange(2), "prefetcher"],
        [0, rng.randrange(3, 7), rng.randrange(2), "worker"],  # after the checkpoint of step 2
        [1, rng.randrange(1, 4), rng.randrange(2), "manager+prefetcher"],
        [1, rng.randrange(4, 7), rng.randrange(2), "coordinator"],
    ]
    reports = [[0, 2], [1, 1], [1, 3], [1, 6]]
    result = fit(loop, {"train": stream}, 2, tmp_path, max_failures=1, report_at=reports, faults=faults)
    stream.close()
    assert len(list((tmp_path / "log").glob("fault-*"))) == len(faults)
    entries = read_log(tmp_path)
    first, second = [entry["start"] for entry in entries if "start" in entry][2:]
    assert first == second and first in ([0, 2], [0, 0])  # the latter where the report had not reached Ray Train yet
    assert delivered(entries) == reference(stream, 2)
    assert result.checkpoint is not None
    saved = json.loads(Path(result.checkpoint.path, "lance_stream.json").read_text())["streams"]["train"]
    assert saved["epoch"] == 1 and saved["samples_consumed_per_split"] == 6 * 4


@pytest.mark.timeout(600)
def test_a_run_shrinks_with_a_lost_node_and_grows_with_new_ones(
    nodes: Nodes, tables: Tables, tmp_path: Path, rng: Random
) -> None:
    nodes.add_loader()
    nodes.add_trainer()
    lost = nodes.add_trainer()
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120)
    stream = tables.stream(403, num_splits=8, global_batch_size=16, prefetch=prefetch)
    failed: list[BaseException] = []
    steps = rng.randrange(2, 16)  # before the next fault

    def run() -> None:
        try:
            fit(
                until_told,
                {"train": stream},
                (1, 3),
                tmp_path,
                max_failures=8,
                scaling={
                    "use_gpu": True,
                    "resources_per_worker": {"GPU": 1},
                    "elastic_resize_monitor_interval_s": 4,
                },
                step_s=0.2,
                report_every=4,
            )
        except BaseException as error:
            failed.append(error)

    training = threading.Thread(target=run)
    training.start()
    try:
        wait_until(lambda: steps_at(tmp_path, 2, failed) > steps, 180, "steps of two workers")
        nodes.lose(lost)
        wait_until(lambda: steps_at(tmp_path, 1, failed) > steps, 180, "steps of one worker")
        nodes.add_trainer()
        nodes.add_trainer()
        wait_until(lambda: steps_at(tmp_path, 3, failed) > steps, 180, "steps of three workers")
    finally:
        (tmp_path / "log").mkdir(exist_ok=True)
        epochs = [entry["at"][0] for entry in read_log(tmp_path) if "at" in entry]
        (tmp_path / "log" / "last").write_text(str(max(epochs, default=0) + 1))
        training.join(120)
    stream.close()
    assert not failed and not training.is_alive()
    batches = delivered(read_log(tmp_path))
    assert batches == reference(stream, 1 + max(epoch for epoch, _ in batches))


def steps_at(storage: Path, world: int, failed: list[BaseException]) -> int:
    """How many steps have been logged at a world size."""
    assert not failed, failed
    return sum(1 for entry in read_log(storage) if "at" in entry and entry["world"] == world)
