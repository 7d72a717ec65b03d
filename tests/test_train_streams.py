"""Several streams in one run of Ray Train, each with a state of its own in the run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Tables
from runs import delivered, fit, opened_here, read_log, reference
from saveloops import train_and_validate

from ray_lance_stream import LanceStream, PrefetchConfig, StreamDataConfig
from ray_lance_stream.checkpoint import locate, read_streams

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("one_node")]
NUM_CPUS = 8
PREFETCH = PrefetchConfig(num_actors=1, placement_timeout_s=120)


def streams_of(tables: Tables, **options: Any) -> dict[str, LanceStream]:
    """Streams with other splits, steps and orders: 5 steps an epoch of training, 6 of validation, 4 of the probe."""
    return {
        "train": tables.stream(299, num_splits=12, global_batch_size=60, prefetch=PREFETCH, **options),
        "validation": tables.stream(50, order="lancedb", prefetch=PREFETCH, **options),
        "probe": tables.stream(13, num_splits=1, global_batch_size=4, shuffle=False, prefetch=PREFETCH, **options),
    }


@pytest.mark.timeout(600)
def test_each_stream_of_a_run_goes_on_where_it_was(tables: Tables, tmp_path: Path) -> None:
    """Validation is split over the ranks; each of them reads the probe whole, and rank 0 alone opens it at first."""
    streams = streams_of(tables)
    dataset_config = StreamDataConfig(datasets_to_split=["train", "validation"])
    result = fit(train_and_validate, streams, 2, tmp_path, max_failures=2, dataset_config=dataset_config)
    for stream in streams.values():
        stream.close()

    entries = read_log(tmp_path)
    assert sorted(entry["start"] for entry in entries if "start" in entry) == [[0, 0]] * 2 + [[0, 3]] * 2 + [[0, 4]] * 2
    assert delivered(entries) == reference(streams["train"], 2), "validation does not disturb training"

    entries = read_log(tmp_path, "run.validation")
    starts = [entry["start"] for entry in entries if "start" in entry]
    assert sorted(starts) == [[0, 0], [0, 0], [1, 3], [1, 3]], "carried over the checkpoint in which nobody opened it"
    want = reference(streams["validation"], 3)
    assert delivered(entries) == {at: ids for at, ids in want.items() if at <= (2, 2)}

    entries = read_log(tmp_path, "run.probe")
    want = reference(streams["probe"], 2)
    for rank in (0, 1):
        own = [entry for entry in entries if entry.get("rank") == rank]
        starts = [entry["start"] for entry in own if "start" in entry]
        assert starts == ([[0, 0], [0, 2]] if rank == 0 else [[0, 2]])
        assert {tuple(e["at"]): e["ids"] for e in own if "at" in e} == {
            at: ids for at, ids in want.items() if at <= (1, 1) and (rank == 0 or at > (0, 2))
        }

    assert result.checkpoint is not None
    states = read_streams(*locate(result.checkpoint.path))
    assert states is not None
    places = {name: (state.epoch, state.completed_cycles) for name, state in states.items()}
    assert places == {"train": (2, 0), "validation": (2, 4), "probe": (1, 4)}
    resumed = streams_of(tables, resume_from=result.checkpoint.path)
    with opened_here(resumed["train"]) as shard:
        assert [b["id"].tolist() for b in shard.iter_batches()] == [
            ids for at, ids in reference(streams["train"], 3).items() if at[0] == 2
        ]
    with opened_here(resumed["validation"], "validation") as shard:
        assert [b["id"].tolist() for b in shard.iter_batches()] == [
            ids for at, ids in reference(streams["validation"], 3).items() if at > (2, 2)
        ]
