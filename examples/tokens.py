"""Language-model tokens: documents packed into sequences, and a loss that is the mean over all tokens of a step.

Takes modules of Python's standard library as documents and their bytes as tokens. ``shard.loss_scale`` makes means
over rows right, for any number of workers and micro-batches. A mean over tokens needs counts, for sequences differ in
how many tokens there are to predict. Here each micro-batch adds the *sum* of its losses to the gradient, the ranks add
up their counts, and the gradient is divided by the step's. At the end one process that takes whole steps has to agree.
"""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from ray_lance_stream import LanceStream, StreamDataConfig, StreamShard, report

END, PAD, IGNORED = 256, 257, -100
LENGTH, SPLITS, STEP, MICRO = 128, 4, 12, 2  # tokens of a sequence, splits, sequences of a step and of a micro-batch


def write_table(uri: str) -> None:
    """Writes one row of tokens for each small module of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for file in files if 0 < len(text := file.read_bytes()) < 4000]
    tokens = pa.array([list(text) for text in texts], pa.list_(pa.int32()))
    lancedb.connect(uri).create_table("modules", pa.table({"tokens": tokens}))


def targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The next token of the same document; none at a document's end, and none for padding."""
    ids, documents = batch["input_ids"], batch["doc_ids"]
    following = torch.full_like(ids, IGNORED)
    same = (documents[:, 1:] == documents[:, :-1]) & (ids[:, 1:] != PAD)
    following[:, :-1] = torch.where(same, ids[:, 1:], IGNORED)
    return following


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(258, 16), nn.Linear(16, 258)).double()  # doubles: to compare sums closely


def train(shard: StreamShard, model: nn.Module, micro_batch_size: int | None, world_size: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens, padding, total = torch.zeros(1), 0, 0
    for batch in shard.iter_torch_batches(micro_batch_size=micro_batch_size):
        labels = targets(batch)
        tokens += (labels != IGNORED).sum()
        padding += int((batch["input_ids"] == PAD).sum())
        with nullcontext() if shard.is_step_end or world_size == 1 else model.no_sync():  # type: ignore[operator]
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
        if not shard.is_step_end:
            continue
        if world_size > 1:
            torch.distributed.all_reduce(tokens)
        for weights in model.parameters():
            if weights.grad is not None:
                weights.grad *= world_size / max(tokens.item(), 1)  # DDP averages; a step may be all padding
        optimizer.step()
        optimizer.zero_grad()
        total += int(tokens.item())
        tokens.zero_()
    return {"steps": len(shard), "tokens": total, "padding": padding}


def train_loop(_: dict[str, Any]) -> None:
    net, context = build_model(), ray.train.get_context()
    shard, model = ray.train.get_dataset_shard("train"), ray.train.torch.prepare_model(net)
    found = train(shard, model, MICRO, context.get_world_size())
    with tempfile.TemporaryDirectory() as directory:
        torch.save(net.state_dict(), f"{directory}/model.pt")
        report(found, Checkpoint.from_directory(directory) if context.get_world_rank() == 0 else None)


def main(output: Path) -> dict[str, Any]:
    write_table(str(output / "db"))
    packed: dict[str, Any] = {"pack_sequences": LENGTH, "eos_id": END, "pad_id": PAD, "blocks_per_epoch": 320}
    stream = LanceStream(
        str(output / "db"), "modules", num_splits=SPLITS, global_batch_size=STEP, columns=["tokens"], **packed
    )
    result = TorchTrainer(
        train_loop,
        datasets={"train": stream},
        dataset_config=StreamDataConfig(),
        scaling_config=ScalingConfig(num_workers=3),  # which do not divide the splits: one worker gets more than others
        run_config=RunConfig(name="tokens", storage_path=str(output / "runs")),
    ).fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        trained = torch.load(f"{directory}/model.pt", weights_only=True)
    alone = build_model()
    with stream.open() as shard:
        found = train(shard, alone, micro_batch_size=None, world_size=1)
    stream.close()
    apart = max(float((trained[name] - weights).abs().max()) for name, weights in alone.state_dict().items())
    moved = max(float((weights - trained[name]).abs().max()) for name, weights in build_model().state_dict().items())
    return found | {"tokens_of_workers": (result.metrics or {})["tokens"], "apart": apart, "moved": moved}


if __name__ == "__main__":
    ray.init(address="local", log_to_driver=False)
    shutil.rmtree("output/tokens", ignore_errors=True)
    found = main(Path("output/tokens").resolve())
    print(f"{found['steps']} steps, {found['tokens']:,} tokens predicted, {found['padding']:,} of padding")
    print(f"weights moved by up to {found['moved']:.3f}; 3 workers and 1 process are {found['apart']:.1e} apart")
