"""A plain training loop without Ray: it is stopped in the middle of an epoch, and goes on with the next row.

Trains on scikit-learn's digits. The stream's state is plain JSON next to the weights; loading both continues bit for
bit, which is shown by training once without a break.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch
from sklearn.datasets import load_digits
from torch import nn

from ray_lance_stream import LanceStream

EPOCHS = 3


def write_table(uri: str) -> None:
    """Writes id, image (64 values from 0 to 1) and label."""
    digits = load_digits()
    images = pa.FixedSizeListArray.from_arrays(pa.array((digits.data / 16).astype(np.float32).ravel()), 64)
    table = pa.table({"id": np.arange(len(images)), "image": images, "label": digits.target})
    lancedb.connect(uri).create_table("digits", table)


def train(uri: str, directory: Path, stop_at: tuple[int, int] | None = None) -> list[list[int]]:
    """Trains to the end, or until it has saved after (epoch, step); returns the ids of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stream = LanceStream(uri, "digits", num_splits=12, global_batch_size=96, shuffle_seed=42)
    delivered = []
    with stream.open() as shard:
        if (directory / "stream.json").exists():
            shard.load_state_dict(json.loads((directory / "stream.json").read_text()))
            saved = torch.load(directory / "model.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for epoch in range(shard.epoch, EPOCHS):
            for batch in shard.iter_torch_batches():
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                delivered.append(batch["id"].tolist())
                if (epoch, shard.step) == stop_at:
                    save(directory, shard.state_dict(), model, optimizer)
                    return delivered
        save(directory, shard.state_dict(), model, optimizer)
    return delivered


def save(directory: Path, state: dict[str, object], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "model.pt")
    (directory / "stream.json").write_text(json.dumps(state))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(directory / "model.pt", weights_only=True)["model"]
    return loaded


def main(output: Path) -> dict[str, object]:
    uri = str(output / "db")
    write_table(uri)
    first = train(uri, output / "stopped", stop_at=(1, 7))
    second = train(uri, output / "stopped")
    whole = train(uri, output / "whole")
    with_break, without = weights(output / "stopped"), weights(output / "whole")
    return {
        "steps": [len(first), len(second)],
        "same_rows": first + second == whole,
        "rows": len({row for step in whole for row in step}),
        "same_weights": all(torch.equal(with_break[name], without[name]) for name in without),
    }


if __name__ == "__main__":
    shutil.rmtree("output/plain_torch", ignore_errors=True)
    print(json.dumps(main(Path("output/plain_torch").resolve())))
