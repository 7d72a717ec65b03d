"""The tables that rates are measured on, and how they are written for each reader."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa

ROWS = {"a": 500_000, "b": 100_000, "c": 10_000, "d": 4_000}
FILES = 8  # of data in each table: readers that hand out whole files to tasks get several
_MDS = {"a": "ndarray:float32:64", "b": "ndarray:int32:1024", "c": "bytes", "d": "bytes"}


def rows_of(workload: str, start: int, count: int) -> pa.RecordBatch:
    """Makes rows of a workload; the same for the same numbers."""
    rng = np.random.default_rng(start)
    label = np.arange(start, start + count)
    x: Any
    if workload == "a":
        x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(count * 64, dtype=np.float32)), 64)
    elif workload == "b":
        tokens = rng.integers(0, 50_000, count * 1024, dtype=np.int32)
        x = pa.FixedSizeListArray.from_arrays(pa.array(tokens), 1024)
    elif workload == "c":
        x = pa.array([rng.bytes(100_000) for _ in range(count)], pa.binary())
    else:
        x = pa.array([_jpeg(rng) for _ in range(count)], pa.binary())
    return pa.record_batch({"x": x, "label": label})


def decode(batch: pa.RecordBatch) -> dict[str, Any]:
    """Decodes JPEG images to arrays of (rows, 224, 224, 3)."""
    return {"x": np.stack([image(data.as_py()) for data in batch["x"]]), "label": batch["label"]}


def image(data: bytes) -> Any:
    """Decodes a JPEG image to an array of (224, 224, 3)."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def ensure_table(directory: str, workload: str, rows: int) -> str:
    """Writes a workload's table unless it is there; returns its name."""
    name = f"{workload}{rows}"
    path = Path(directory, f"{name}.lance")
    if not path.exists():  # all that a process does that is measured, or starts Ray, which Lance's threads must not see
        unfinished = path.with_stem(f"{name}-unfinished")
        schema = rows_of(workload, 0, 1).schema
        table = lancedb.connect(directory).create_table(unfinished.stem, schema=schema, mode="overwrite")
        for chunk in _chunks(workload, rows):
            table.add(chunk)
        unfinished.rename(path)
    return name


def ensure_shards(directory: str, name: str, kind: str) -> str:
    """Writes the same rows in the format of ``mosaicml-streaming`` or ``litdata`` unless they are there."""
    path = Path(directory, f"{name}.{kind}")
    if not (path / "index.json").exists():
        workload, rows = name[0], int(name[1:])
        if kind == "mds":
            streaming: Any = importlib.import_module("streaming")  # also the name of a directory of tests
            with streaming.MDSWriter(out=str(path), columns={"x": _MDS[workload], "label": "int"}) as out:
                for row in _rows(workload, rows):
                    out.write(row)
        else:
            path.mkdir(parents=True, exist_ok=True)
            litdata: Any = importlib.import_module("litdata.streaming.writer")
            writer = litdata.BinaryWriter(str(path), chunk_bytes="64MB")
            for index, row in enumerate(_rows(workload, rows)):
                writer.add_item(index, row)
            writer.done()
            writer.merge()
    return str(path)


def _chunks(workload: str, rows: int) -> Iterator[pa.RecordBatch]:
    chunk = -(-rows // FILES)
    return (rows_of(workload, start, min(chunk, rows - start)) for start in range(0, rows, chunk))


def _rows(workload: str, rows: int) -> Iterator[dict[str, Any]]:
    for chunk in _chunks(workload, rows):
        x: Any = chunk["x"]
        width = {"a": 64, "b": 1024}.get(workload)
        values = x.to_pylist() if width is None else x.flatten().to_numpy().reshape(-1, width)
        for value, label in zip(values, chunk["label"].to_pylist(), strict=True):
            yield {"x": value, "label": label}


def _jpeg(rng: np.random.Generator) -> bytes:
    from PIL import Image

    small = rng.integers(0, 255, (14, 14, 3), dtype=np.uint8)  # smooth, as photographs are
    out = io.BytesIO()
    Image.fromarray(small).resize((224, 224), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()
