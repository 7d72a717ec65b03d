"""Trainers that run the loop themselves: what they trained on, through kills, is what one reader is handed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import ray.train
import torch
from conftest import Tables
from loops import ids_of
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from runs import delivered, opened_here, read_log, reference
from trainerloops import with_lightning, with_transformers

from ray_lance_stream import LanceStream, PrefetchConfig, StreamDataConfig
from ray_lance_stream.checkpoint import FILE_NAME, read_streams
from ray_lance_stream.errors import ConfigError, StateError, StreamClosedError
from ray_lance_stream.integrations.trained import TrainedBatches
from ray_lance_stream.link import open_shards, speaking

pytestmark = pytest.mark.thorough

NUM_CPUS = 4
ROWS = 50  # of which 48 make up the 4 splits: 6 steps of 8 an epoch
Loop = Callable[[dict[str, Any]], None]


def fit(loop: Loop, stream: LanceStream, workers: int, storage: Path, **config: Any) -> ray.train.Result:
    """Fits on a process group; the worker group may start again once."""
    (storage / "log").mkdir(parents=True, exist_ok=True)
    settings = {"log": str(storage / "log"), "name": "run", "rows": ROWS, "num_splits": 4, "kill_at": []}
    return TorchTrainer(
        loop,
        train_loop_config=settings | config,
        datasets={"train": stream},
        dataset_config=StreamDataConfig(),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(storage / "runs"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def seen_by(checkpoint: Any, file: str) -> list[int]:
    """How often the weights in a checkpoint were trained on each row."""
    with checkpoint.as_directory() as directory:
        assert Path(directory, FILE_NAME).exists()
        path = Path(directory, file)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)["seen"]
        else:
            found = torch.load(path, weights_only=False)["state_dict"]["model.seen"]
        seen: list[int] = found.tolist()
        return seen


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(
    ("framework", "loop", "weights"),
    [
        ("lightning", with_lightning, "checkpoint.ckpt"),
        ("transformers", with_transformers, "checkpoint/model.safetensors"),
    ],
)
def test_weights_are_trained_on_each_row_once_an_epoch_whoever_is_killed(
    tables: Tables, tmp_path: Path, framework: str, loop: Loop, weights: str
) -> None:
    pytest.importorskip(framework)
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120)
    stream = tables.stream(ROWS, columns=["id", "x"], prefetch=prefetch)
    config = {"micro_batch_size": 2}
    # Checkpoints are after steps 3 and 6. A worker dies two steps behind the first, then in the step that follows
    # the second, when the trainer has fetched on into the next epoch.
    with pytest.raises(ray.train.TrainingFailedError):
        fit(loop, stream, 2, tmp_path, kill_at=[[0, 5], [1, 1]], **config)
    stream.close()
    result = fit(loop, stream, 3, tmp_path, **config)
    stream.close()

    entries = read_log(tmp_path)
    starts = [(entry["start"], entry["world"]) for entry in entries if entry.get("rank") == 0 and "start" in entry]
    # A worker may die before Ray Train has heard that all ranks have reported: then the one before is the last.
    assert [world for _, world in starts] == [2, 2, 3] and starts[0][0] == [0, 0]
    assert starts[1][0] in ([0, 0], [0, 3]) and starts[2][0] in ([0, 3], [1, 0])
    wanted = reference(stream, 2)
    assert delivered(entries) == wanted
    in_plan = {row for (epoch, _), ids in wanted.items() if epoch == 0 for row in ids}
    in_next = {row for (epoch, _), ids in wanted.items() if epoch == 1 for row in ids}
    assert result.checkpoint is not None
    times = [(row in in_plan) + (row in in_next) for row in range(ROWS)]
    assert seen_by(result.checkpoint, weights) == times
    states = read_streams(result.checkpoint.filesystem, result.checkpoint.path)
    assert states is not None and (states["train"].epoch, states["train"].completed_cycles) == (2, 0)


# --- the batches, without a framework ---------------------------------------------------------------


def batches_of(stream: LanceStream, **options: Any) -> TrainedBatches:
    return TrainedBatches(opened_here(stream), **options)


def test_the_state_is_that_of_the_batch_trained_on(tables: Tables) -> None:
    stream = tables.stream(ROWS)
    wanted = list(reference(stream, 2).values())
    batches = batches_of(stream)
    fetched = iter(batches)
    held = [next(fetched) for _ in range(3)]
    assert batches.state().completed_cycles == 0 and batches.step == 0
    batches.trained()
    assert (batches.epoch, batches.step, batches.state().completed_cycles) == (0, 1, 2)
    assert batches.stats().batches == 1
    with opened_here(stream) as other:
        other.load_state_dict(batches.state().to_dict())
        assert ids_of(next(iter(other.iter_batches()))) == ids_of(held[1]) == wanted[1]
    # The loop is left with two batches that nobody trained on: they come again, and then the rest.
    rest = []
    for batch in batches:
        rest.append(ids_of(batch))
        batches.trained()
    assert rest == wanted[1:6]
    assert (batches.epoch, batches.step) == (1, 0)
    with pytest.raises(StreamClosedError):
        next(fetched)
    again = iter(batches)
    assert ids_of(next(again)) == wanted[6]
    assert (batches.epoch, batches.step) == (1, 0)
    batches.close()


def test_behind_the_last_batch_of_an_epoch_the_next_one_begins(tables: Tables) -> None:
    """Also for a trainer that does not fetch ahead, and has not asked whether another batch comes."""
    batches = batches_of(tables.stream(ROWS))
    fetched = iter(batches)
    for _ in range(6):
        next(fetched)
        batches.trained()
    state = batches.state()
    assert (state.epoch, state.completed_cycles) == (1, 0)
    assert next(fetched, None) is None
    batches.close()


def test_micro_batches_have_their_own_scale_and_no_state(tables: Tables) -> None:
    batches = batches_of(tables.stream(ROWS), micro_batch_size=3)
    fetched = iter(batches)
    sizes = [len(next(fetched)["id"]) for _ in range(6)]
    scales = []
    for size in sizes[:3]:
        scales.append(batches.loss_scale * 8 / size)
        last = batches.is_step_end
        batches.trained()
        assert batches.at_step_end is last
        if not last:
            with pytest.raises(StateError, match="at the end of a step"):
                batches.state()
    assert scales == pytest.approx([1, 1, 1]) and batches.state().completed_cycles == 2
    batches.close()


def test_a_batch_that_is_not_out_cannot_have_been_trained_on(tables: Tables) -> None:
    batches = batches_of(tables.stream(ROWS))
    with pytest.raises(ConfigError, match="none is out"):
        batches.trained()
    batches.close()


def test_a_run_saves_what_was_trained_on_and_not_the_shard(tables: Tables) -> None:
    shard: Any = opened_here(tables.stream(ROWS), name="of this test")
    batches = TrainedBatches(shard)
    assert speaking()["of this test"] is shard.speaker() is cast(Any, batches)
    assert not hasattr(batches, "load_state_dict") and not hasattr(batches, "__len__")
    del batches
    assert speaking()["of this test"] is shard
    open_shards.pop("of this test")
    shard.close()


@pytest.mark.parametrize(("module", "needs"), [("lightning", "Lightning"), ("transformers", "transformers")])
def test_a_framework_that_is_missing_is_named(module: str, needs: str) -> None:
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['lightning', 'lightning.pytorch.callbacks', 'pytorch_lightning',"
        " 'pytorch_lightning.callbacks', 'transformers']))\n"
        f"import ray_lance_stream.integrations.{module}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and f"needs {needs}" in last and "ray-lance-stream[integrations]" in last


def test_a_trainer_of_other_data_is_refused(tables: Tables) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    ours = importlib.import_module("ray_lance_stream.integrations.transformers")
    theirs = importlib.import_module("ray_lance_stream.integrations.lightning")

    class Bare:
        train_dataset = None
        train_dataloader = None

    with pytest.raises(ConfigError, match="does not train on a stream"):
        ours.prepare_trainer(Bare())
    batches = batches_of(tables.stream(ROWS))
    with pytest.raises(ConfigError, match=r"trainer\.fit\(module, batches\)"):
        theirs.StreamReportCallback(batches).on_train_start(Bare(), None)
    batches.close()
    with opened_here(tables.stream(ROWS)) as shard:
        assert len(ours.StreamBatches(shard, micro_batch_size=3)) == 18


@pytest.mark.slow
def test_lightning_goes_on_with_the_next_batch_from_every_checkpoint(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step and at every end of an epoch, by Lightning's own restoring, in this process."""
    pl = pytest.importorskip("lightning.pytorch")
    ours = importlib.import_module("ray_lance_stream.integrations.lightning")
    wanted = list(reference(tables.stream(ROWS), 3).values())
    saves: list[tuple[Path, dict[str, Any], int]] = []

    def save(callback: Any, trainer: Any) -> None:
        path = tmp_path / f"{len(saves)}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        saves.append((path, callback.batches.state().to_dict(), trainer.global_step))

    monkeypatch.setattr(ours.StreamReportCallback, "_report", save)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, taken: list[list[int]]) -> None:
            super().__init__()
            self.net, self.taken = torch.nn.Linear(3, 1), taken

        def training_step(self, batch: Any, _: int) -> Any:
            self.taken.append(batch["id"].tolist())
            return self.net(batch["x"].float() / 100).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def trained(path: Path | None, **resume: Any) -> list[list[int]]:
        taken: list[list[int]] = []
        batches = batches_of(tables.stream(ROWS, **resume))
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
        callback = ours.StreamReportCallback(batches, every_n_steps=1)
        trainer = pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=[callback], **quiet)
        trainer.fit(Module(taken), batches, ckpt_path=path)
        batches.close()
        return taken

    assert trained(None) == wanted
    assert len(saves) == 18 + 3
    for path, state, step in list(saves):
        assert trained(path, resume_from=state) == wanted[step:]
