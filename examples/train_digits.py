"""Train on handwritten digits, lose a worker, and continue on another number of workers with the next row.

Writes scikit-learn's digits to a LanceDB table and trains a small convolutional network on it with
``TorchTrainer``. The first run is broken off by a worker that is killed; a second ``fit()`` of the same
run name continues from its last checkpoint with more workers. At the end the ids of every global batch
that the workers saw are compared, in order, with those of one uninterrupted reader. With ``--resume`` a run that
was stopped goes on likewise, on whatever cluster it is submitted to.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # how soon Train takes in a report
# Lance warns of forks. Ray forks only to execute another program at once, which is safe.
warnings.filterwarnings("ignore", message=".*fork")

import lancedb
import numpy as np
import pyarrow as pa
import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

from ray_lance_stream import LanceStream, PrefetchConfig, StreamDataConfig, TransformContext, report

_STARTS_WITHIN_S = 900.0  # a node that is launched for the run: the machine, its image, the packages


def say(line: str) -> None:
    """Prints a line of what goes on, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def write_table(uri: str, name: str) -> None:
    """Writes id, image (64 values from 0 to 1), label and is_train; every fifth digit is kept for the test.

    A table of that name that is there already is left as it is.
    """
    digits = load_digits()
    ids = np.arange(len(digits.target))
    images = pa.FixedSizeListArray.from_arrays(pa.array((digits.data / 16).astype(np.float32).ravel()), 64)
    columns = {"id": ids, "image": images, "label": digits.target, "is_train": ids % 5 != 0}
    lancedb.connect(uri).create_table(name, pa.table(columns), exist_ok=True)


def augment(batch: pa.RecordBatch, ctx: TransformContext) -> dict[str, Any]:
    """Shifts half of the images by up to one pixel; the same ones by the same at every retry, resume or size."""
    images_column: Any = batch["image"]
    pixels = images_column.flatten().to_numpy().reshape(-1, 8, 8)
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    shifts = [rng.integers(0, 3, size=2) if rng.random() < 0.5 else (1, 1) for rng in ctx.generators()]
    images = np.stack([image[y : y + 8, x : x + 8] for image, (y, x) in zip(padded, shifts, strict=True)])
    return {"id": batch["id"], "image": images[:, None], "label": batch["label"]}


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context, shard = ray.train.get_context(), ray.train.get_dataset_shard("train")
    rank, world = context.get_world_rank(), context.get_world_size()
    net = build_model()
    model: Any = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters())
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            saved = torch.load(f"{directory}/model.pt", weights_only=True, map_location="cpu")
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    total = config["epochs"] * len(shard)
    seen: list[int] = []
    with open(f"{config['log_dir']}/{config['attempt']}-{rank}.jsonl", "w") as log:
        for epoch in range(shard.epoch, config["epochs"]):
            for batch in shard.iter_torch_batches(micro_batch_size=config["micro_batch_size"]):
                with nullcontext() if shard.is_step_end or world == 1 else model.no_sync():
                    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                    (loss * shard.loss_scale).backward()
                seen += batch["id"].tolist()
                if not shard.is_step_end:
                    continue
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * (1 - (epoch * len(shard) + shard.step - 1) / total)
                optimizer.step()
                optimizer.zero_grad()
                splits = len(shard.replica.owned_splits(config["num_splits"]))
                entry = {"at": [epoch, shard.step], "rank": rank, "world": world, "splits": splits, "ids": seen}
                print(json.dumps(entry), file=log, flush=True)
                seen = []
                if config["fail_at"] == [epoch, shard.step] and rank == world - 1:
                    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
                if shard.step % config["checkpoint_every"] == 0:
                    save(net, optimizer, {"epoch": epoch, "step": shard.step}, rank)
    stats = shard.stats()
    speed = {"wait_share": stats.wait_share, "samples_per_s": world * stats.rows / (stats.wait_s + stats.train_s)}
    save(net, optimizer, {"epoch": shard.epoch, "step": shard.step, **speed}, rank)


def save(net: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any], rank: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{directory}/model.pt")
            checkpoint = Checkpoint.from_directory(directory)
        report(metrics, checkpoint)


def last_result(run: str) -> ray.train.Result | None:
    """Returns what a run has saved last, from which the next ``fit()`` of the same name goes on."""
    try:
        result = ray.train.Result.from_path(run)
    except RuntimeError:  # there is no such run, or it has saved nothing
        return None
    return result if result.checkpoint else None


def logged_batches(log_dir: Path) -> tuple[dict[tuple[int, int], list[int]], list[int], int]:
    """Puts the workers' logs together: {(epoch, step): ids in order}, the world sizes, steps run again."""
    attempts: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for path in log_dir.glob("*.jsonl"):
        attempt, rank = map(int, path.stem.split("-"))
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        attempts.setdefault(attempt, {})[rank] = entries
    batches: dict[tuple[int, int], list[int]] = {}
    worlds, replayed = [], 0
    for _, ranks in sorted(attempts.items()):
        # Steps that every rank has finished; zip leaves out the one in which the group was killed.
        for parts in zip(*(entries for _, entries in sorted(ranks.items())), strict=False):
            if len(parts) < parts[0]["world"]:
                break
            at = tuple(parts[0]["at"])
            worlds += [len(parts)] if at == tuple(ranks[0][0]["at"]) else []
            columns = [np.array(part["ids"]).reshape(-1, part["splits"]) for part in parts]
            ids = np.concatenate(columns, axis=1).ravel().tolist()
            replayed += at in batches
            if batches.setdefault(at, ids) != ids:
                sys.exit(f"step {at} was delivered differently after the restart")
    return batches, worlds, replayed


def reference_batches(stream: LanceStream, epochs: int) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Reads the same stream in this process, with one replica and without interruption."""
    with stream.open() as shard:
        for epoch in range(epochs):
            for batch in shard.iter_batches():
                yield (epoch, shard.step), batch["id"].tolist()


def accuracy(uri: str, table: str, checkpoint: Checkpoint) -> float:
    rows = lancedb.connect(uri).open_table(table).search().where("NOT is_train").limit(None).to_arrow()
    images = rows["image"].combine_chunks().flatten().to_numpy().reshape(-1, 1, 8, 8)
    model = build_model()
    with checkpoint.as_directory() as directory:
        path = f"{directory}/model.pt"
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["model"])
    with torch.no_grad():
        guesses = model(torch.from_numpy(images.copy())).argmax(1).numpy()
    return float((guesses == rows["label"].to_numpy()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--uri", help="LanceDB database, a path or URI; by default one in --output")
    parser.add_argument("--table", default="digits")
    parser.add_argument(
        "--workers", type=int, nargs=2, default=(2, 3), help="before the failure and after it, or from --resume on"
    )
    parser.add_argument("--num-splits", type=int, default=16)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS", "local"),
        help="Ray cluster; by default the one a job was submitted to, else one on this machine",
    )
    parser.add_argument("--output", type=Path, default=Path("output/digits"), help="a directory that all nodes see")
    parser.add_argument("--storage-path", help="where checkpoints go, a path or URI; by default in --output")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what is in --output, if anything is; else that is removed"
    )
    parser.add_argument("--use-gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument(
        "--autoscaled",
        action="store_true",
        help="reserve a CPU for each prefetcher, which makes Ray launch a node for it, and wait for nodes",
    )
    args = parser.parse_args()
    output = args.output.resolve()
    if not args.resume:
        for name in ("db", "ids", "runs"):  # of an earlier run; nothing else that may be there
            shutil.rmtree(output / name, ignore_errors=True)
    (output / "ids").mkdir(parents=True, exist_ok=True)
    uri = args.uri or str(output / "db")
    storage_path = args.storage_path or str(output / "runs")
    run_path = f"{storage_path}/digits"

    began = time.perf_counter()
    # A CPU for each trainer; prefetchers reserve none by default.
    local = {"num_cpus": max(args.workers)} if args.address == "local" else {}
    say("starting Ray ..." if local else "connecting to Ray ...")
    # Before any table is opened: starting Ray forks, and Lance has threads from then on.
    # Of Ray's own messages only errors are shown here, among lines of progress; the rest is in its files of logs.
    ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR, **local)
    write_table(uri, args.table)
    stream = LanceStream(
        uri,
        args.table,
        num_splits=args.num_splits,
        global_batch_size=args.global_batch_size,
        shuffle_seed=42,
        filter="is_train",
        columns=["id", "image", "label"],
        transform=augment,
        prefetch=PrefetchConfig(num_cpus=1, placement_timeout_s=_STARTS_WITHIN_S) if args.autoscaled else None,
    )
    config = {
        "epochs": args.epochs,
        "num_splits": args.num_splits,
        "micro_batch_size": args.micro_batch_size,
        "checkpoint_every": args.checkpoint_every,
        "log_dir": str(output / "ids"),
    }

    def fit(workers: int, fail_at: list[int] | None) -> ray.train.Result:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config=config | {"fail_at": fail_at, "attempt": time.time_ns()},
            datasets={"train": stream},
            dataset_config=StreamDataConfig(),
            torch_config=TorchConfig(backend="nccl" if args.use_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=args.use_gpu),
            run_config=RunConfig(
                name="digits", storage_path=storage_path, checkpoint_config=CheckpointConfig(num_to_keep=3)
            ),
        )
        try:
            return trainer.fit()
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C: Ray Train ends the run and then the process
            say("\nStopped. With --resume it goes on after the last checkpoint.")
            raise

    cycles = lancedb.connect(uri).open_table(args.table).count_rows("is_train") // args.num_splits
    steps_per_epoch = -(-cycles * args.num_splits // args.global_batch_size)
    total = steps_per_epoch * args.epochs
    before, after = args.workers
    with stream:
        if (result := last_result(run_path)) is None:
            epoch, step = fail_at = [args.epochs // 3, args.checkpoint_every + 5]
            say(
                f"On purpose, the worker of rank {before - 1} will be killed after step {step} of epoch {epoch} (of "
                f"{args.epochs}). Ray's message that a worker died is expected then."
            )
            try:
                with stream.progress(args.epochs):
                    fit(before, fail_at)
            except ray.train.TrainingFailedError as error:
                stream.close()  # what is left of the first run; without this it would end by itself
                say(f"\nThe run broke off: {type(error).__name__}. It goes on with {after} workers.\n")
            result = last_result(run_path)
        metrics = (result.metrics if result else None) or {"epoch": 0, "step": 0}
        done = metrics["epoch"] * steps_per_epoch + metrics["step"]
        if done < total:
            say(f"resuming after step {done} of {total} with {after} workers")
            with stream.progress(args.epochs):
                result = fit(after, fail_at=None)
    ray.shutdown()

    batches, worlds, replayed = logged_batches(output / "ids")
    equal = batches == dict(reference_batches(stream, args.epochs))
    metrics = (result.metrics if result else None) or {}
    score = accuracy(uri, args.table, result.checkpoint) if result and result.checkpoint else 0.0
    print(f"\nworld sizes          {' -> '.join(map(str, worlds))}")
    print(f"steps                {len(batches)}, of which {replayed} were run again after a failure or stop")
    print(f"samples/s            {metrics['samples_per_s']:,.0f} (last world size)")
    print(f"waiting for data     {metrics['wait_share']:.1%} of the training loop's time")
    print(f"                     (much of it for the first batch of each epoch, here every {steps_per_epoch} steps)")
    print(f"ordered ids          {'equal' if equal else 'NOT EQUAL'} to one uninterrupted reader's")
    print(f"test accuracy        {score:.1%}")
    print(f"time                 {time.perf_counter() - began:.0f} s")
    print(f"table                {uri}")
    print(f"checkpoints          {run_path}")
    print(f"ids of each step     {output / 'ids'}")
    if not equal or score < 0.97:
        sys.exit(1)


if __name__ == "__main__":
    main()
