"""The canonical order as a Ray Dataset, and functions of ``map_batches`` as transforms."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray.data
from conftest import Tables
from runs import opened_here

from ray_lance_stream import ConfigError, LanceStream, MapBatches, PrefetchConfig, ReplaceRow, TransformError
from ray_lance_stream.local import LocalLink
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.topology import Seat

ROWS = 403
TINY = PrefetchConfig(block_bytes=500)


def batches(stream: LanceStream, epoch: int) -> list[dict[str, Any]]:
    """The global batches of an epoch, as one reader in this process gets them."""
    with StreamShard(stream.config, Seat(), LocalLink(stream.recipe)) as shard:
        for _ in range(epoch):
            for _ in shard.iter_batches():
                pass
        return list(shard.iter_batches())


def rows(dataset: Any, column: str) -> list[Any]:
    """A column of a dataset, in its order."""
    return [row[column] for row in dataset.iter_rows()]


@pytest.fixture
def in_order() -> Iterator[None]:
    """Ray Data keeps the order of blocks."""
    options = ray.data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    yield
    options.preserve_order = before


def jitter(batch: pa.RecordBatch, ctx: Any) -> dict[str, Any]:
    return {"id": batch["id"], "noise": np.array([generator.random() for generator in ctx.generators()])}


def fail_on_seven(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 7 in batch["id"].to_pylist():
        raise ValueError("seven")
    return batch.select(["id"])


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.usefixtures("one_node", "in_order")
class TestDataset:
    def test_rows_are_those_of_training_in_their_order(self, tables: Tables) -> None:
        stream = tables.stream(ROWS, filter="id % 3 != 0", transform=jitter, prefetch=TINY)
        for epoch, step in ((1, 0), (0, 20)):
            expected = batches(stream, epoch)[step:]
            dataset = stream.to_dataset(epoch=epoch, start_step=step, override_num_blocks=5).materialize()
            assert dataset.num_blocks() >= 5
            assert rows(dataset, "id") == np.concatenate([b["id"] for b in expected]).tolist()
            assert rows(dataset, "noise") == np.concatenate([b["noise"] for b in expected]).tolist()

    def test_it_is_an_ordinary_dataset(self, tables: Tables) -> None:
        stream = tables.stream(ROWS, columns=["id", "x"], drop_last=True)
        dataset = stream.to_dataset(start_step=3)
        expected = np.concatenate([batch["id"] for batch in batches(stream, 0)[3:]])
        assert dataset.count() == len(expected) == (ROWS // 4 * 4) // 8 * 8 - 24
        doubled = dataset.map_batches(lambda batch: {"id": batch["id"] * 2, "sum": np.stack(batch["x"]).sum(axis=1)})
        assert rows(doubled, "id") == (expected * 2).tolist()

    def test_what_is_replaced_stays_and_what_is_skipped_is_refused(self, tables: Tables) -> None:
        options: dict[str, Any] = {"columns": ["id"], "transform": fail_on_seven}
        stream = tables.stream(50, on_transform_error=ReplaceRow({"id": -1}), **options)
        expected = np.concatenate([batch["id"] for batch in batches(stream, 0)]).tolist()
        assert rows(stream.to_dataset(), "id") == expected and -1 in expected
        with pytest.raises(ConfigError, match=r"skips rows.*\n?.*ReplaceRow"):
            tables.stream(50, on_transform_error="skip", **options).to_dataset()

    def test_it_begins_where_a_state_says(self, tables: Tables) -> None:
        drawn = tables.stream(150, shuffle_seed=None, skip_steps=[(0, 3, 4), (0, 9, 9), (1, 2, 2)])
        with opened_here(drawn) as shard:
            given = iter(shard.iter_batches())
            seen = [i for batch in itertools.islice(given, 3) for i in batch["id"].tolist()]
            step, state = shard.step, shard.state_dict()
            rest = [i for batch in given for i in batch["id"].tolist()]
            second = [i for batch in shard.iter_batches() for i in batch["id"].tolist()]
        again = tables.stream(150, shuffle_seed=None, resume_from=state)
        assert rows(again.to_dataset(), "id") == seen + rest
        assert rows(again.to_dataset(start_step=step), "id") == rest
        assert rows(again.to_dataset(epoch=1), "id") == second
        with pytest.raises(ConfigError, match="epoch is not valid"):
            again.to_dataset(epoch=2**63)

    def test_the_end_of_the_epoch(self, tables: Tables) -> None:
        stream = tables.stream(50)
        assert stream.to_dataset(start_step=6).count() == 0
        with pytest.raises(ConfigError, match="start_step"):
            stream.to_dataset(start_step=7)
        with pytest.raises(ConfigError, match="epoch"):
            stream.to_dataset(epoch=-1)


def scaled(batch: dict[str, Any], by: float, *, plus: float = 0.0) -> dict[str, Any]:
    return {"id": batch["id"], "y": np.stack(batch["x"]) * by + plus}


class Scaler:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, batch: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"id": batch["id"], "y": batch["id"] * self.by})


def first_rows(stream: LanceStream) -> dict[str, Any]:
    with StreamShard(stream.config, Seat(), LocalLink(stream.recipe)) as shard:
        found: dict[str, Any] = next(iter(shard.iter_batches()))
        return found


def test_functions_of_map_batches_are_transforms(tables: Tables) -> None:
    found = first_rows(tables.stream(50, transform=MapBatches(scaled, fn_args=(2.0,), fn_kwargs={"plus": 1.0})))
    x = found["id"][:, None] + np.array([0.0, 0.25, 0.5])
    assert found["y"].tolist() == (x * 2 + 1).tolist()
    found = first_rows(
        tables.stream(50, transform=MapBatches(Scaler, batch_format="pandas", fn_constructor_args=(3.0,)))
    )
    assert found["y"].tolist() == (found["id"] * 3.0).tolist()
    found = first_rows(tables.stream(50, transform=MapBatches(lambda t: t.select(["id"]), batch_format="pyarrow")))
    assert list(found) == ["id"]


def test_batches_are_as_ray_data_gives_them() -> None:
    batch = pa.RecordBatch.from_pydict({"id": [1, 2], "text": ["a", "b"]})
    same: dict[str, Any] = MapBatches(lambda rows: rows)(batch)
    assert {name: values.tolist() for name, values in same.items()} == {"id": [1, 2], "text": ["a", "b"]}
    assert isinstance(same["id"], np.ndarray)
    again = pickle.loads(pickle.dumps(MapBatches(Scaler, batch_format="pandas", fn_constructor_args=(2.0,))))
    assert again(batch)["y"].tolist() == [2.0, 4.0]
    with pytest.raises(ConfigError, match="batch_format='torch'"):
        MapBatches(scaled, batch_format="torch")
    with pytest.raises(TransformError, match="yields"):
        MapBatches(lambda rows: (part for part in [rows]))(batch)
