"""The loader's arguments: what each does here, or why it is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, canonical, flat, ids


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": [0, 1]},
        {"batch_sampler": [[0, 1]]},
        {"in_order": False},
        {"persistent_workers": True, "num_workers": 2},
        {"drop_last": True},
        {"num_workers": -1},
        {"batch_size": 0},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_arguments_that_cannot_work(side: Side, table_of: OpenTable, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        side.loader(side.one(table_of(24)), **options)


def test_a_dataset_of_another_kind(side: Side, table_of: OpenTable) -> None:
    class Changed(side.dataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return iter(())

    class Named(side.dataset):  # type: ignore[misc, name-defined]
        pass

    for dataset in ([1, 2], range(3), Changed(table_of(24))):
        with pytest.raises(TypeError, match="StreamingDataset"):
            side.loader(dataset)
    assert len(list(side.loader(Named(table_of(24)), batch_size=8))) == 3


def test_classes_of_the_two_libraries_are_not_mixed(ours: Side, table_of: OpenTable) -> None:
    with pytest.raises(TypeError, match=r"lancedb\.streaming\.StreamingDataset"):
        ours.loader(LANCEDB.one(table_of(24)))


def test_there_is_no_length(side: Side, table_of: OpenTable) -> None:
    with pytest.raises(TypeError):
        len(side.loader(side.one(table_of(24))))


def test_arguments_without_a_use_are_named(ours: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ray_lance_stream"):
        loader = ours.loader(ours.one(table_of(24), shuffle=False), batch_size=4, timeout=5)
    assert "timeout" in caplog.text
    assert len(list(loader)) == 6


@pytest.mark.parametrize("world_size", [3, 5, 6])
def test_ranks_that_own_unequally_many_splits(ours: Side, table_of: OpenTable, world_size: int) -> None:
    """Batches of whole cycles are accepted; of others the error says which sizes would be."""
    splits = 8
    datasets = ours.open(table_of(211), world_size, num_splits=splits)
    shares = []
    for dataset in datasets:
        owned = len(dataset.owned_splits)
        if owned > 1:
            for size in (owned * 2 - 1, owned * 2 + 1, 1, None):
                with pytest.raises(ValueError, match=f"such as .*{owned * 2 if size and size > 1 else owned}"):
                    ours.loader(dataset, batch_size=size)
        shares.append(batch_ids(ours.loader(dataset, batch_size=2 * owned)))
    assert len({len(share) for share in shares}) == 1
    found = canonical([flat(share) for share in shares], splits)
    assert found == ids(LANCEDB.one(table_of(211), num_splits=splits))


def test_prefetchers_for_several_ranks_need_a_cluster(
    ours: Side, table_of: OpenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would start a cluster of its own."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray.is_initialized()
    dataset = ours.open(table_of(24), 2)[0]
    with pytest.raises(ValueError, match="prefetchers need a Ray cluster"):
        ours.loader(dataset, num_workers=2)
    assert not ray.is_initialized()
    assert len(list(ours.loader(dataset, batch_size=4))) == 3
