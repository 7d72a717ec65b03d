"""A program of ``lancedb.streaming`` moved over, and its checkpoint resumed in Ray Train.

The program is :func:`read`. It moves by its import line::

    from lancedb.streaming import StreamingDataset      # before
    from ray_lance_stream import StreamingDataset       # after

A checkpoint that LanceDB's class took in the middle of an epoch is then continued twice: by the same program after
the move, and by two workers of Ray Train. Both get exactly the rows that were left.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lancedb
import lancedb.streaming
import numpy as np
import pyarrow as pa
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

from ray_lance_stream import LanceStream, StreamDataConfig, StreamingDataset

SPLITS, SEED = 8, 42


def read(
    dataset_class: Any, table: Any, rows: int | None = None, state: dict[str, Any] | None = None
) -> tuple[list[int], dict[str, Any]]:
    """The program: reads some rows, or the rest of the epoch; returns their ids, and the state after them."""
    dataset = dataset_class(table, num_splits=SPLITS, shuffle_seed=SEED, columns=["id", "label"])
    if state is not None:
        dataset.load_state_dict(state)
    ids = []
    for row in dataset:
        ids.append(row["id"])
        if len(ids) == rows:
            break
    return ids, dataset.state_dict()


def train_loop(config: dict[str, Any]) -> None:
    shard, rank = ray.train.get_dataset_shard("train"), ray.train.get_context().get_world_rank()
    steps = [batch["id"].tolist() for batch in shard.iter_torch_batches()]  # the rest of the epoch
    Path(config["output"], f"delivered-{rank}.json").write_text(json.dumps(steps))


def main(output: Path) -> dict[str, Any]:
    digits = load_digits()
    columns = {"id": np.arange(len(digits.target)), "label": digits.target}
    table = lancedb.connect(output / "db").create_table("digits", pa.table(columns))

    # Before the move: LanceDB's own class, stopped in the middle of its epoch.
    before, state = read(lancedb.streaming.StreamingDataset, table, rows=SPLITS * 50)
    checkpoint = output / "state.json"
    checkpoint.write_text(json.dumps(state))

    # After the move: the same program.
    rest, _ = read(StreamingDataset, table, state=json.loads(checkpoint.read_text()))

    # In Ray Train: any number of workers from 1 to num_splits.
    stream = LanceStream(
        str(output / "db"),
        "digits",
        num_splits=SPLITS,
        global_batch_size=64,
        shuffle_seed=SEED,
        columns=["id", "label"],
        order="lancedb",
        resume_from=json.loads(checkpoint.read_text()),
    )
    TorchTrainer(
        train_loop,
        train_loop_config={"output": str(output)},
        datasets={"train": stream},
        dataset_config=StreamDataConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="moved", storage_path=str(output / "runs")),
    ).fit()
    stream.close()
    left, right = (json.loads((output / f"delivered-{rank}.json").read_text()) for rank in range(2))
    half = SPLITS // 2  # of every cycle the first half is rank 0's
    trained: list[int] = []
    for ids, others in zip(left, right, strict=True):
        trained += np.hstack([np.reshape(ids, (-1, half)), np.reshape(others, (-1, half))]).ravel().tolist()

    whole, _ = read(lancedb.streaming.StreamingDataset, table)
    return {"before": len(before), "whole": whole, "by_the_program": before + rest, "by_ray_train": before + trained}


if __name__ == "__main__":
    ray.init(address="local", log_to_driver=False)
    shutil.rmtree("output/moved", ignore_errors=True)
    found = main(Path("output/moved").resolve())
    print(f"{found['before']} of {len(found['whole'])} rows before the checkpoint")
    for name in ("by_the_program", "by_ray_train"):
        print(f"{name:15} {'all rows, in order' if found[name] == found['whole'] else 'NOT the rows of one reader'}")
