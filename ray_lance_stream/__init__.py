"""Elastic, exactly resumable training streams from LanceDB tables on Ray.

* :class:`LanceStream` is the recipe; pass it to ``TorchTrainer(datasets={"train": stream})``.
* :class:`StreamShard` is what ``ray.train.get_dataset_shard("train")`` returns in a training worker.
* :class:`StreamingDataset` takes the place of the class of that name in ``lancedb.streaming``.
* :func:`report` is ``ray.train.report`` with the stream's state in the checkpoint.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_lance_stream.config import PrefetchConfig
    from ray_lance_stream.dataset import StreamingDataset
    from ray_lance_stream.errors import (
        BlockError,
        ConfigError,
        DeadlyRowError,
        LanceStreamError,
        LockstepError,
        MissingStateError,
        PlacementError,
        StaleIncarnationError,
        StateError,
        StateMismatchError,
        StreamClosedError,
        TableVersionError,
        TransformError,
    )
    from ray_lance_stream.gathering import gather_state_dict, load_rank_states, save_rank_state
    from ray_lance_stream.loader import StreamingDataLoader
    from ray_lance_stream.mapbatches import MapBatches
    from ray_lance_stream.rowcontext import TransformContext
    from ray_lance_stream.saving import report, save_state
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.sifting import ReplaceRow, SkippedRow
    from ray_lance_stream.state import merge_state_dicts
    from ray_lance_stream.stats import PoolSize, PrefetcherStats, RankStats, RunProgress, ShardStats, StreamStats
    from ray_lance_stream.stream import LanceStream
    from ray_lance_stream.train import StreamDataConfig

# Imported when first used: an actor that plans or merges states must not wait for torch or Lance.
_HOME = {
    "BlockError": "errors",
    "ConfigError": "errors",
    "DeadlyRowError": "errors",
    "LanceStream": "stream",
    "LanceStreamError": "errors",
    "LockstepError": "errors",
    "MapBatches": "mapbatches",
    "MissingStateError": "errors",
    "PlacementError": "errors",
    "PoolSize": "stats",
    "PrefetchConfig": "config",
    "PrefetcherStats": "stats",
    "RankStats": "stats",
    "ReplaceRow": "sifting",
    "RunProgress": "stats",
    "ShardStats": "stats",
    "SkippedRow": "sifting",
    "StaleIncarnationError": "errors",
    "StateError": "errors",
    "StateMismatchError": "errors",
    "StreamClosedError": "errors",
    "StreamDataConfig": "train",
    "StreamShard": "shard",
    "StreamStats": "stats",
    "StreamingDataLoader": "loader",
    "StreamingDataset": "dataset",
    "TableVersionError": "errors",
    "TransformContext": "rowcontext",
    "TransformError": "errors",
    "gather_state_dict": "gathering",
    "load_rank_states": "gathering",
    "merge_state_dicts": "state",
    "report": "saving",
    "save_rank_state": "gathering",
    "save_state": "saving",
}

__all__ = [
    "BlockError",
    "ConfigError",
    "DeadlyRowError",
    "LanceStream",
    "LanceStreamError",
    "LockstepError",
    "MapBatches",
    "MissingStateError",
    "PlacementError",
    "PoolSize",
    "PrefetchConfig",
    "PrefetcherStats",
    "RankStats",
    "ReplaceRow",
    "RunProgress",
    "ShardStats",
    "SkippedRow",
    "StaleIncarnationError",
    "StateError",
    "StateMismatchError",
    "StreamClosedError",
    "StreamDataConfig",
    "StreamShard",
    "StreamStats",
    "StreamingDataLoader",
    "StreamingDataset",
    "TableVersionError",
    "TransformContext",
    "TransformError",
    "gather_state_dict",
    "load_rank_states",
    "merge_state_dicts",
    "report",
    "save_rank_state",
    "save_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
