"""The readers that rates are compared of. Each yields (rows, batch) for one epoch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from benchmarks.workloads import ensure_shards, image

BATCH, SPLITS, SEED = 480, 48, 3
BLOCK_BYTES = 32 * 2**20
FIRST_BLOCK_BYTES, GROWTH = 128 * 2**10, 4  # as our reader begins an epoch
Batches = Iterator[Any]
Transform = Callable[..., Any] | None


def bare(
    directory: str, name: str, clump: int | None, transform: Transform, *, first_bytes: int | None = None
) -> Batches:
    """One thread that reads blocks in random order and gathers them; smaller ones first, as ours does, if told to."""
    import lance

    dataset = lance.dataset(str(Path(directory, f"{name}.lance")))
    count, rng = dataset.count_rows(), np.random.default_rng(SEED)
    order = rng.permutation(count) if clump is None else _clumps(rng, count, clump)
    row_bytes = dataset.take([0, 1, 2]).nbytes / 3
    start, block_bytes = 0, BLOCK_BYTES if first_bytes is None else first_bytes
    while start < count:
        rows = order[start : start + max(BATCH, int(block_bytes / row_bytes))]
        start, block_bytes = start + len(rows), min(BLOCK_BYTES, GROWTH * block_bytes)
        ordered = np.argsort(rows, kind="stable")
        back = np.empty_like(ordered)
        back[ordered] = np.arange(len(rows))
        table = dataset.take(rows[ordered].tolist()).take(pa.array(back)).combine_chunks()
        block = table if transform is None else transform(table.to_batches()[0])
        yield len(rows), block


def _clumps(rng: np.random.Generator, count: int, clump: int) -> Any:
    starts = rng.permutation(-(-count // clump)) * clump
    rows = (starts[:, None] + np.arange(clump)).ravel()
    return rows[rows < count]


def ours(stream_args: dict[str, Any], ready: Callable[[], None], *, warm_up: bool) -> Batches:
    """Our stream, with whatever prefetchers the process has Ray for; after an epoch that does not count, if told to."""
    from ray_lance_stream import LanceStream

    stream = LanceStream(num_splits=SPLITS, global_batch_size=BATCH, shuffle_seed=SEED, **stream_args)
    with stream.open() as shard:
        for _ in shard.iter_torch_batches() if warm_up else ():
            pass
        ready()
        for batch in shard.iter_torch_batches():
            yield len(batch["label"]), batch


def lancedb_streaming(
    directory: str, name: str, clump: int | None, transform: Transform, workers: int, read_size: int
) -> Batches:
    """LanceDB's own classes, whose transforms return a list of rows: without one, each number is a Python object."""
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        lancedb.connect(directory).open_table(name),
        num_splits=SPLITS,
        shuffle_seed=SEED,
        shuffle_clump_size=clump,
        read_batch_size=read_size,
        transform=functools.partial(_rows_of, transform),
    )
    how: Any = {"multiprocessing_context": "spawn"} if workers else {}  # Lance does not survive a fork
    for batch in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **how):
        yield len(batch["label"]), batch


def _rows_of(transform: Transform, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    if transform is not None:
        x = transform(batch)["x"]
    elif pa.types.is_fixed_size_list(batch["x"].type):
        column: Any = batch["x"]
        x = column.flatten().to_numpy().reshape(batch.num_rows, -1)
    else:
        x = batch["x"].to_pylist()
    return [{"x": one, "label": label} for one, label in zip(x, batch["label"].to_pylist(), strict=True)]


def ray_data(directory: str, name: str, transform: Transform, *, shuffled: bool) -> Batches:
    """Ray Data's reader; shuffled, it holds the whole table in its object store."""
    import ray.data

    dataset = ray.data.read_lance(str(Path(directory, f"{name}.lance")))
    dataset = dataset.random_shuffle(seed=SEED) if shuffled else dataset
    if transform is not None:
        decoding = transform
        dataset = dataset.map_batches(
            lambda table: decoding(table.combine_chunks().to_batches()[0]), batch_format="pyarrow"
        )
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy"):
        yield len(batch["label"]), batch


def mosaicml(directory: str, name: str, clump: int | None, workers: int) -> Batches:
    """``mosaicml-streaming``: by row, all rows are shuffled; with clumps, its default, which keeps shards together."""
    from torch.utils.data import DataLoader

    streaming: Any = importlib.import_module("streaming")  # also the name of a directory of tests

    path = ensure_shards(directory, name, "mds")
    dataset = _decoding(streaming.StreamingDataset, name)(
        local=path,
        shuffle=True,
        shuffle_seed=SEED,
        shuffle_algo="naive" if clump is None else "py1e",
        batch_size=BATCH,
    )
    for batch in DataLoader(dataset, batch_size=BATCH, num_workers=workers):
        yield len(batch["label"]), batch


def litdata(directory: str, name: str, workers: int) -> Batches:
    """``litdata``, which shuffles chunks of 64 MB, and rows within them."""
    lit: Any = importlib.import_module("litdata")
    path = ensure_shards(directory, name, "lit")
    dataset = _decoding(lit.StreamingDataset, name)(path, shuffle=True, seed=SEED)
    for batch in lit.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers):
        yield len(batch["label"]), batch


def _decoding(base: Any, name: str) -> Any:
    """A class of datasets of rows, which decodes images."""
    if not name.startswith("d"):
        return base

    class Decoding(base):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return row | {"x": np.array(image(row["x"]))}

    return Decoding
