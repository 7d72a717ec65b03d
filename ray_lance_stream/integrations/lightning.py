"""Lightning: a callback that reports checkpoints to Ray Train with the stream's state.

``ray.train.lightning.RayTrainReportCallback`` reports without it, and Lightning fetches a batch ahead of the one it
trains on. :class:`StreamReportCallback` takes that one's place::

    def train_loop(config):
        batches = TrainedBatches(ray.train.get_dataset_shard("train"))
        trainer = lightning.pytorch.Trainer(
            max_epochs=10,
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[StreamReportCallback(batches, every_n_steps=100)],
            enable_checkpointing=False,
        )
        with resumed() as path:
            trainer.fit(module, batches, ckpt_path=path)

The module multiplies a loss that is a mean over rows by ``batches.loss_scale``. With ``micro_batch_size`` it optimises
by hand (``automatic_optimization = False``), and steps where ``batches.is_step_end`` says so: Lightning's own
accumulation counts batches, and divides the loss by that count.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from ray.train import Checkpoint, CheckpointUploadMode

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.integrations.trained import TrainedBatches
from ray_lance_stream.saving import report, resumed_part

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ModuleNotFoundError as error:
        raise ImportError(
            explain(
                "ray_lance_stream.integrations.lightning needs Lightning",
                found="neither lightning nor pytorch_lightning is installed",
                expected="one of them",
                remedy="pip install 'ray-lance-stream[integrations]'",
            )
        ) from error

__all__ = ["StreamReportCallback", "TrainedBatches", "resumed"]


class StreamReportCallback(Callback):
    """Reports Lightning's checkpoint to Ray Train, with the state of the batches that were trained on.

    At the end of every epoch, as Ray's callback, and every so many steps. A checkpoint holds ``checkpoint.ckpt`` and
    ``lance_stream.json``.

    Args:
        batches: The trainer's ``train_dataloaders``.
        every_n_steps: Optimizer steps between checkpoints within an epoch; none by default.
        on_epoch_end: Whether to report at the end of an epoch.
        checkpoint_upload_mode: As for ``ray.train.report``.
        validation: As for ``ray.train.report``.
    """

    CHECKPOINT_NAME: ClassVar[str] = "checkpoint.ckpt"

    def __init__(
        self,
        batches: TrainedBatches,
        *,
        every_n_steps: int | None = None,
        on_epoch_end: bool = True,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        validation: Any = False,
    ) -> None:
        super().__init__()
        self.batches = batches
        self._every_n_steps = every_n_steps
        self._on_epoch_end = on_epoch_end
        self._upload_mode = checkpoint_upload_mode
        self._validation = validation

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks that the trainer iterates what this callback counts."""
        del pl_module
        if trainer.train_dataloader is not self.batches:
            raise ConfigError(
                explain(
                    "the trainer does not iterate the batches of its StreamReportCallback",
                    found=f"train_dataloaders={trainer.train_dataloader!r}",
                    expected="the TrainedBatches that the callback was built with",
                    remedy="call trainer.fit(module, batches)",
                )
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch; reports if it is time to."""
        del pl_module, outputs, batch, batch_idx
        self.batches.trained()
        every = self._every_n_steps
        if every is not None and self.batches.at_step_end and trainer.global_step % every == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports."""
        del pl_module
        if self._on_epoch_end:
            self._report(trainer)

    def _report(self, trainer: Any) -> None:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        directory = tempfile.mkdtemp()
        trainer.save_checkpoint(Path(directory, self.CHECKPOINT_NAME), weights_only=False)
        report(
            metrics | {"epoch": trainer.current_epoch, "step": trainer.global_step},
            Checkpoint.from_directory(directory),
            checkpoint_upload_mode=self._upload_mode,
            validation=self._validation,
        )
        trainer.strategy.barrier()
        if not self._upload_mode.default_delete_local_checkpoint_after_upload():
            shutil.rmtree(directory)


def resumed() -> AbstractContextManager[str | None]:
    """Gives the path of the run's last ``checkpoint.ckpt``, for ``ckpt_path``; None if the run begins."""
    return resumed_part(StreamReportCallback.CHECKPOINT_NAME)
