"""Packed streams on real Ray actors, and under Ray Train: failures, checkpoints, resumes at other world sizes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lancedb.streaming
import pytest
import ray
import ray.train
from loops import ids_of, loop
from packed import table_of
from ray.train import Checkpoint, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from runs import delivered, fit, named_actors, read_log, reference, wait_until

from ray_lance_stream import LanceStream, PrefetchConfig, StreamingDataset, report
from ray_lance_stream.state import StreamState

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_node")]
NUM_CPUS = 8
SPLITS, STEPS = 12, 5  # of 5 cycles, the last one of 4
# Documents of 0 to 96 tokens; some of them null.
DOCUMENTS: list[Any] = [[100 * d + 100 + t for t in range((d * 37) % 97)] for d in range(301)]
PACKED: dict[str, Any] = {
    "num_splits": SPLITS,
    "columns": ["tokens"],
    "pack_sequences": 32,
    "eos_id": 1,
    "pad_id": 2,
    "blocks_per_epoch": 24 * SPLITS,
    "shuffle_seed": 3,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(database, table)."""
    path = tmp_path_factory.mktemp("documents")
    documents = [None if d % 41 == 7 else tokens for d, tokens in enumerate(DOCUMENTS)]
    return str(path), table_of(path, documents)


def stream_of(source: Any, **options: Any) -> LanceStream:
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120)
    settings: dict[str, Any] = {"global_batch_size": 60, "on_transform_error": "skip", "prefetch": prefetch}
    return LanceStream(source[0], "t", **PACKED | settings | options)


@pytest.mark.slow
def test_blocks_come_through_a_prefetcher_that_is_killed(source: Any) -> None:
    small = PrefetchConfig(num_actors=1, block_bytes=4000, max_buffer_bytes=100_000)
    stream = stream_of(source, prefetch=small)
    dataset = StreamingDataset(source[1], **PACKED | {"order": "feistel", "on_transform_error": "skip"})
    expected = [block["input_ids"].tolist() for block in dataset]
    found, killed = [], 0
    shard: Any
    with stream.open() as shard:
        for batch in shard.iter_batches(prefetch_batches=0):
            found += batch["input_ids"].tolist()
            if shard.step == 2:
                ((_, pid),) = ray.get(shard.link.session.coordinator.prefetchers.remote())
                os.kill(pid, signal.SIGKILL)
                killed += 1
        state = shard.state_dict()
        assert shard.stats().retries > 0
        assert len({row.row_number for row in shard.skipped}) == shard.stats().rows_skipped > 0
    assert killed == 1
    assert found == expected
    assert (state["epoch"], state["blocks_emitted_per_split"]) == (1, [0] * SPLITS)
    wait_until(lambda: not named_actors(stream), 30, "everything has ended")


def _local(config: dict[str, Any]) -> None:
    shard = ray.train.get_dataset_shard("train")
    for batch in shard.iter_batches():
        config["seen"].append(ids_of(batch))
        if shard.step == 3:
            with tempfile.TemporaryDirectory() as directory:
                report({"step": 3}, Checkpoint.from_directory(directory))
                config["state"].append(json.loads(Path(directory, "lance_stream.json").read_text()))
    shard.close()


def test_local_mode(source: Any) -> None:
    stream = stream_of(source)
    config: dict[str, Any] = {"seen": [], "state": []}
    DataParallelTrainer(
        lambda: _local(config), datasets={"train": stream}, scaling_config=ScalingConfig(num_workers=0)
    ).fit()
    assert config["seen"] == list(reference(stream, 1).values())
    state = config["state"][0]["streams"]["train"]
    assert state["blocks_emitted_per_split"] == 15 and any(state["pack_offsets"])
    rest = stream_of(source, resume_from=state)
    assert list(reference(rest, 1).values()) == config["seen"][3:]


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_that_fails_and_a_second_fit_at_another_world_size(source: Any, tmp_path: Path) -> None:
    stream = stream_of(source)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(loop, {"train": stream}, 2, tmp_path, report_at=[[0, 3]], fail_at=[0, 5], micro_batch_size=7)
    later = stream_of(source)
    fit(loop, {"train": later}, 5, tmp_path, report_at=[[1, 2]])
    stream.close()
    later.close()
    entries = read_log(tmp_path)
    starts = [entry["start"] for entry in entries if "start" in entry]
    # As below.
    assert starts in ([[0, 0]] * 2 + [[0, 3]] * 5, [[0, 0]] * 7)
    expected = reference(stream, 2)
    assert len(expected) == 2 * STEPS
    assert delivered(entries) == expected
    (newest,) = sorted((tmp_path / "runs" / "run").glob("checkpoint_*/lance_stream.json"))[-1:]
    state = json.loads(newest.read_text())["streams"]["train"]
    assert (state["epoch"], state["blocks_emitted_per_split"]) == (1, 10)
    assert any(state["pack_offsets"])


@pytest.mark.long
@pytest.mark.slow
def test_a_run_restarts_in_lancedbs_order_and_lancedbs_class_goes_on_from_its_checkpoint(
    source: Any, tmp_path: Path
) -> None:
    stream = stream_of(source, order="lancedb")
    fit(loop, {"train": stream}, 2, tmp_path, max_failures=1, report_at=[[0, 2], [1, 1]], fail_at=[1, 3])
    stream.close()
    entries = read_log(tmp_path)
    assert delivered(entries) == reference(stream, 2)
    starts = [entry["start"] for entry in entries if "start" in entry]
    # A worker may die before Ray Train has heard that all ranks have reported: then the report before is the last.
    assert starts in ([[0, 0]] * 2 + [[1, 1]] * 2, [[0, 0]] * 2 + [[0, 2]] * 2)
    # What the checkpoint holds, LanceDB goes on from.
    (newest,) = sorted((tmp_path / "runs" / "run").glob("checkpoint_*/lance_stream.json"))[-1:]
    state = json.loads(newest.read_text())["streams"]["train"]
    assert "pack_offsets" not in state and state["pack_buffers"]
    dataset = lancedb.streaming.StreamingDataset(source[1], epoch=1, **PACKED | {"on_transform_error": "skip"})
    dataset.load_state_dict(StreamState.from_dict(state).to_dict())
    rest = [int(i) for block in dataset for i in ids_of({k: v.numpy()[None] for k, v in block.items()})]
    expected = reference(stream, 2)
    assert rest == [i for (epoch, step), ids in sorted(expected.items()) for i in ids if (epoch, step) > (1, 1)]
