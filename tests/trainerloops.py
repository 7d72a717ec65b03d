"""Training loops that leave the loop to Lightning, or to Hugging Face's Trainer. Training workers import this."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed
from loops import Log
from torch import nn

from ray_lance_stream.integrations.trained import TrainedBatches

Batch = dict[str, torch.Tensor]


class Seen(nn.Module):
    """A model whose weights say what it was trained on: ``seen[i]`` counts how often row i was, on any rank."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.net = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(rows, dtype=torch.int64))

    def forward(self, id: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = torch.bincount(id, minlength=len(self.seen))
        torch.distributed.all_reduce(counts)
        self.seen += counts
        return {"loss": self.net(x.float() / 100).pow(2).mean()}


class Trained:
    """Logs the batches that are trained on, and kills a worker where it is told to, once."""

    def __init__(self, config: dict[str, Any], batches: TrainedBatches) -> None:
        self._config, self._batches = config, batches
        self._log = Log(config, batches)
        self._log.event(start=[batches.epoch, batches.step], world=self._log.world, rank=self._log.rank)
        self._ids: list[int] = []

    def batch(self, batch: Batch) -> None:
        """Notes the batch in training."""
        place = self._batches._in_training
        at = [place.epoch, place.step]
        self._ids += batch["id"].tolist()
        if not place.is_step_end:
            return
        splits = len(self._batches.replica.owned_splits(self._config["num_splits"]))
        self._log.event(at=at, rank=self._log.rank, world=self._log.world, splits=splits, ids=self._ids)
        self._ids = []
        mark = Path(self._config["log"], "killed-{}-{}".format(*at))
        if at in self._config["kill_at"] and self._log.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def with_lightning(config: dict[str, Any]) -> None:
    """Trains for two epochs; checkpoints every three steps and at the ends of epochs."""
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    from ray_lance_stream.integrations.lightning import StreamReportCallback, resumed

    batches = TrainedBatches(ray.train.get_dataset_shard("train"))
    trained = Trained(config, batches)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Seen(config["rows"])

        def training_step(self, batch: Batch, _: int) -> Any:
            trained.batch(batch)
            return self.model(batch["id"], batch["x"])["loss"] * batches.loss_scale

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy=RayDDPStrategy(),  # type: ignore[no-untyped-call]
        plugins=[RayLightningEnvironment()],  # type: ignore[no-untyped-call]
        callbacks=[StreamReportCallback(batches, every_n_steps=3)],
        limit_train_batches=config.get("limit_train_batches"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    with resumed() as path:
        prepare_trainer(trainer).fit(Module(), batches, ckpt_path=path)


def with_transformers(config: dict[str, Any]) -> None:
    """Trains for two epochs, two micro-batches a step; checkpoints every three steps."""
    from transformers import Trainer, TrainingArguments

    from ray_lance_stream.integrations.transformers import StreamBatches, prepare_trainer, resumed

    batches = StreamBatches(ray.train.get_dataset_shard("train"), micro_batch_size=config["micro_batch_size"])
    trained = Trained(config, batches)

    class Logging(Trainer):
        def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
            trained.batch(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = TrainingArguments(
        output_dir=f"{config['log']}/{config['name']}",
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        save_steps=3,
        learning_rate=1e-4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = prepare_trainer(Logging(Seen(config["rows"]), arguments, train_dataset=batches))
    with resumed() as path:
        trainer.train(resume_from_checkpoint=path)
