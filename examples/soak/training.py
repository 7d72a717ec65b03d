"""The training of the soak: the loop that workers run, and the ``fit()`` around it, in a thread."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_lance_stream import LanceStream, StreamDataConfig, report
from soak.steplog import At, LogWriter

MOST_WORKERS: Final = 3
_MICRO_BATCH_SIZE: Final = 32  # one worker alone gets its 48 rows of a step in two parts
_SAVE_EVERY: Final = 25  # steps
_STEP_S: Final = 0.1  # stands for the work of a model that is worth a cluster
_SAVE_BEFORE_S: Final = 5.0  # a checkpoint is reported within a second; on a machine that does too much, in three
_AFTER_DEADLINE_S: Final = 10.0  # a node that is still there then is not taken at all


def train(config: dict[str, Any]) -> None:
    """Trains until the file ``stop`` appears, and logs every id."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context, shard = ray.train.get_context(), ray.train.get_dataset_shard("train")
    rank, world = context.get_world_rank(), context.get_world_size()
    net = nn.Sequential(nn.Linear(config["width"], 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters())
    weights_at: At = (0, 0)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            saved = torch.load(f"{directory}/model.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        weights_at = (saved["at"][0], saved["at"][1])
    model: nn.Module = DistributedDataParallel(net) if world > 1 else net
    owned = shard.replica.owned_splits(config["num_splits"])
    log = LogWriter(
        config["log"],
        group=_from_rank_0(time.time_ns()),
        rank=rank,
        world=world,
        splits=[owned.start, owned.stop],
        start=[shard.epoch, shard.step],
        weights=weights_at,
        node=ray.get_runtime_context().get_node_id(),
    )
    ids: list[int] = []
    saved_for: int | None = None  # the deadline of the preemption for which a checkpoint was made
    try:
        for epoch in itertools.count(shard.epoch):
            for batch in shard.iter_torch_batches(micro_batch_size=_MICRO_BATCH_SIZE, device="cpu"):
                ids += batch["id"].tolist()
                if shard.is_step_end:
                    log.share((epoch, shard.step), ids)
                    ids = []
                with nullcontext() if shard.is_step_end or world == 1 else model.no_sync():  # type: ignore[operator]
                    loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
                    (loss * shard.loss_scale).backward()
                if not shard.is_step_end:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(_STEP_S)
                info = ray.train.get_preemption_info()
                deadline = info.deadline_ms if info is not None else None
                why = _reason_to_save(config, shard.step, deadline if deadline != saved_for else None)
                if why:
                    _save(net, optimizer, (epoch, shard.step), rank)
                    log.saved((epoch, shard.step), why)
                if why == "last":
                    return
                if why == "preempted" and deadline is not None:
                    saved_for = deadline
                    # Steps after this checkpoint would be in vain: the group ends with the node.
                    time.sleep(max(0.0, deadline / 1000 + _AFTER_DEADLINE_S - time.time()))
    except Exception as error:
        log.error(error)
        raise


def _reason_to_save(config: dict[str, Any], step: int, deadline_ms: int | None) -> str:
    """Why all ranks save now, which rank 0 decides: clocks and files must not part them. Empty if they do not."""
    reasons = ("", "in turn", "preempted", "last")
    reason = "in turn" if step % _SAVE_EVERY == 0 else ""
    if deadline_ms is not None and deadline_ms / 1000 - time.time() < _SAVE_BEFORE_S:
        reason = "preempted"
    if Path(config["stop"]).exists():
        reason = "last"
    return reasons[_from_rank_0(reasons.index(reason))]


def _from_rank_0(number: int) -> int:
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told.item())


def _save(net: nn.Module, optimizer: torch.optim.Optimizer, at: At, rank: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "at": list(at)}
            torch.save(content, f"{directory}/model.pt")
            checkpoint = Checkpoint.from_directory(directory)
        report({"epoch": at[0], "step": at[1]}, checkpoint)


class Training:
    """``fit()`` in a thread, so that the driver is free to do harm.

    Args:
        stream: The stream.
        output: Where log and checkpoints go.
        width: Values of a row's x.
    """

    def __init__(self, stream: LanceStream, output: Path, width: int) -> None:
        self.log = output / "log"
        self.log.mkdir()
        self._stop = output / "stop"
        self.error: BaseException | None = None
        config = {
            "log": str(self.log),
            "stop": str(self._stop),
            "num_splits": stream.config.order.num_splits,
            "width": width,
        }
        scaling: dict[str, Any] = {  # Ray's hints know neither a range nor the interval
            "num_workers": (1, MOST_WORKERS),
            "use_gpu": True,
            "resources_per_worker": {"GPU": 1},
            "elastic_resize_monitor_interval_s": 4,
        }
        self._trainer = TorchTrainer(
            train,
            train_loop_config=config,
            datasets={"train": stream},
            dataset_config=StreamDataConfig(),
            torch_config=TorchConfig(backend="gloo", timeout_s=60),
            scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(
                name="soak",
                storage_path=str(output / "runs"),
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=3),
            ),
        )
        # A daemon: the driver must be able to end although Ray does not.
        self._thread = threading.Thread(target=self._fit, name="training", daemon=True)

    def start(self) -> None:
        """Starts the run."""
        self._thread.start()

    def is_running(self) -> bool:
        """Whether the run goes on."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Lets the run end with a checkpoint after its present step; returns whether it did in time."""
        self._stop.touch()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error
