"""Hugging Face's Trainer: batches of a stream, and checkpoints reported to Ray Train with the stream's state.

In place of ``ray.train.huggingface.transformers``, whose callback reports without it::

    def train_loop(config):
        batches = StreamBatches(ray.train.get_dataset_shard("train"))
        trainer = transformers.Trainer(model, TrainingArguments(..., save_steps=100), train_dataset=batches)
        trainer = prepare_trainer(trainer)
        with resumed() as path:
            trainer.train(resume_from_checkpoint=path)

Batches come from the stream as they are: ``per_device_train_batch_size`` and ``data_collator`` have no part in them,
and column names are the model's arguments. With ``micro_batch_size``, ``gradient_accumulation_steps`` must be the
number of micro-batches in a step; that every optimizer step ends where a step of the stream ends is checked.

The Trainer averages losses over ranks. Where it knows the number of tokens in a step (models that take
``num_items_in_batch``) that is the mean over all tokens. Otherwise multiply a mean over rows by ``batches.loss_scale``
in ``compute_loss`` if the ranks' shares differ: if the number of replicas does not divide ``num_splits``.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed
from ray.train import Checkpoint
from torch.utils.data import DataLoader, IterableDataset

from ray_lance_stream.batches import batches_left
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.integrations.trained import TrainedBatches
from ray_lance_stream.position import Position
from ray_lance_stream.saving import report, resumed_part

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError(
        explain(
            "ray_lance_stream.integrations.transformers needs transformers",
            found="it is not installed",
            expected="transformers and accelerate",
            remedy="pip install 'ray-lance-stream[integrations]'",
        )
    ) from error

__all__ = ["StreamBatches", "StreamReportCallback", "prepare_trainer", "resumed"]


class StreamBatches(TrainedBatches, IterableDataset[Any]):
    """:class:`TrainedBatches` as the Trainer's ``train_dataset``.

    Its length is that of a whole epoch, from which the Trainer tells epochs apart and computes ``max_steps``. A stream
    that may skip rows has none, and needs ``max_steps``.
    """

    def __len__(self) -> int:
        """Returns the number of batches, micro-batches counted, in an epoch."""
        config = self._shard._config
        if config.sifts:
            raise TypeError("an epoch of a stream that may skip rows has no length before its end")
        start = Position(provenance=config.provenance)
        return batches_left(self._shard._steps(), self._shard.replica, start, self._micro_batch_size)


class StreamReportCallback(TrainerCallback):
    """Reports every checkpoint that the Trainer saves; :func:`prepare_trainer` adds it.

    A checkpoint holds the Trainer's own in ``checkpoint/``, and ``lance_stream.json``.

    Args:
        batches: The Trainer's ``train_dataset``.
    """

    CHECKPOINT_NAME: ClassVar[str] = "checkpoint"

    def __init__(self, batches: StreamBatches) -> None:
        super().__init__()
        self.batches = batches

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that the stream's step goes on, too."""
        del state, control, kwargs
        if self.batches.at_step_end:
            raise _apart(args, "the last batch of a step of the stream, where the optimizer does not step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that the stream's step has ended, too."""
        del state, control, kwargs
        if not self.batches.at_step_end:
            raise _apart(args, "a step of the optimizer in the middle of a step of the stream")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports what the Trainer has just written."""
        del control, kwargs
        metrics: dict[str, Any] = {}
        for entry in state.log_history:
            metrics |= entry
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank writes its own files into the directory
        written = Path(args.output_dir, f"checkpoint-{state.global_step}")
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if state.is_local_process_zero and written.is_dir():
                shutil.copytree(written, Path(directory, self.CHECKPOINT_NAME))
                checkpoint = Checkpoint.from_directory(directory)
            report(metrics, checkpoint)


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Has a Trainer whose ``train_dataset`` is :class:`StreamBatches` take its batches as they come, and report.

    The stream goes on with the next row by itself, so the Trainer does not skip any (``ignore_data_skip``).

    Raises:
        ConfigError: Its ``train_dataset`` is something else.
    """
    batches = trainer.train_dataset
    if not isinstance(batches, StreamBatches):
        raise ConfigError(
            explain(
                "the Trainer does not train on a stream",
                found=f"train_dataset is a {type(batches).__name__}",
                expected="StreamBatches",
                remedy="pass train_dataset=StreamBatches(ray.train.get_dataset_shard('train'))",
            )
        )

    class StreamTrainer(type(trainer)):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(batches, batch_size=None, collate_fn=_as_it_is)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            batches.trained()
            return loss

    trainer.__class__ = StreamTrainer
    trainer.args.ignore_data_skip = True
    if not any(isinstance(callback, StreamReportCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(StreamReportCallback(batches))
    return trainer


def resumed() -> AbstractContextManager[str | None]:
    """Gives the path of the Trainer's own checkpoint in the run's last, for ``resume_from_checkpoint``, or None."""
    return resumed_part(StreamReportCallback.CHECKPOINT_NAME)


def _as_it_is(batch: Any) -> Any:
    return batch


def _apart(args: Any, found: str) -> ConfigError:
    return ConfigError(
        explain(
            "the Trainer's steps are not those of the stream",
            found=f"{found}, with gradient_accumulation_steps={args.gradient_accumulation_steps}",
            expected="gradient_accumulation_steps to be the number of micro-batches in every step",
            remedy="leave micro_batch_size out, or pass that number; with drop_last=True if the last step has fewer",
        )
    )
