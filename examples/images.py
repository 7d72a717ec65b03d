"""JPEG images in a table: decoded and augmented on prefetchers, trained on by two workers.

Cuts scikit-learn's two photographs, a temple and a flower, into tiles, and learns to tell which photograph a tile is
from. Every augmented tile that the workers got is compared with what one reader gets: the augmentation of a row
depends on the seed, the epoch and its place, not on who makes it.
"""

from __future__ import annotations

import io
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import ray
import ray.train.torch
import torch
from PIL import Image
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_sample_images
from torch import nn

from ray_lance_stream import LanceStream, StreamDataConfig, TransformContext

TILE, CROP, EPOCHS = 40, 32, 8


def write_table(uri: str) -> None:
    """Writes id, jpeg (bytes) and label."""
    tiles, labels = [], []
    for label, picture in enumerate(load_sample_images().images):
        for y in range(0, picture.shape[0] - TILE, TILE):
            for x in range(0, picture.shape[1] - TILE, TILE):
                encoded = io.BytesIO()
                Image.fromarray(picture[y : y + TILE, x : x + TILE]).save(encoded, "JPEG")
                tiles.append(encoded.getvalue())
                labels.append(label)
    lancedb.connect(uri).create_table("tiles", pa.table({"id": range(len(tiles)), "jpeg": tiles, "label": labels}))


def decode_and_augment(batch: pa.RecordBatch, ctx: TransformContext) -> dict[str, Any]:
    """Runs on the prefetchers: decodes, cuts a part out, and mirrors half of the tiles."""
    tiles = []
    for jpeg, rng in zip(batch["jpeg"], ctx.generators(), strict=True):
        y, x = rng.integers(0, TILE - CROP + 1, size=2)
        part = np.asarray(Image.open(io.BytesIO(jpeg.as_py())))[y : y + CROP, x : x + CROP]
        tiles.append(part[:, ::-1] if rng.random() < 0.5 else part)
    return {"id": batch["id"], "tile": np.stack(tiles).transpose(0, 3, 1, 2).copy(), "label": batch["label"]}


def checksums(batch: dict[str, Any]) -> list[list[int]]:
    """(id, checksum of the augmented tile) of each row."""
    pairs = zip(batch["id"].tolist(), batch["tile"], strict=True)
    return [[row, zlib.crc32(np.asarray(tile).tobytes())] for row, tile in pairs]


def train_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shard, rank = ray.train.get_dataset_shard("train"), ray.train.get_context().get_world_rank()
    layers = nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    model: Any = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    delivered, right = [], []
    for _ in range(shard.epoch, EPOCHS):
        for batch in shard.iter_torch_batches():
            logits = model(batch["tile"].float() / 127.5 - 1)
            (nn.functional.cross_entropy(logits, batch["label"]) * shard.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            delivered += checksums(batch)
            right += (logits.argmax(1) == batch["label"]).tolist()
    Path(config["output"], f"rank-{rank}.json").write_text(json.dumps({"delivered": delivered, "right": right}))


def main(output: Path) -> dict[str, Any]:
    uri = str(output / "db")
    write_table(uri)
    stream = LanceStream(
        uri, "tiles", num_splits=8, global_batch_size=32, shuffle_seed=42, transform=decode_and_augment
    )
    TorchTrainer(
        train_loop,
        train_loop_config={"output": str(output)},
        datasets={"train": stream},
        dataset_config=StreamDataConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="images", storage_path=str(output / "runs")),
    ).fit()
    ranks = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(2)]
    trained = [pair for rank in ranks for pair in rank["delivered"]]
    with stream.open() as shard:
        one_reader = [pair for _ in range(EPOCHS) for batch in shard.iter_batches() for pair in checksums(batch)]
    stream.close()
    last_epoch = [guess for rank in ranks for guess in rank["right"][-len(rank["right"]) // EPOCHS :]]
    return {
        "delivered": len(trained),
        "distinct": len({tuple(pair) for pair in trained}),
        "equal": sorted(trained) == sorted(one_reader),
        "accuracy": sum(last_epoch) / len(last_epoch),
    }


if __name__ == "__main__":
    ray.init(address="local", log_to_driver=False)
    shutil.rmtree("output/images", ignore_errors=True)
    found = main(Path("output/images").resolve())
    print(f"{found['delivered']} augmented tiles, {'equal' if found['equal'] else 'NOT EQUAL'} to one reader's")
    print(f"{found['accuracy']:.1%} told right in the last epoch")
