"""Where a dataset that is read row by row gets its blocks: threads of this process, or prefetchers on Ray."""

from __future__ import annotations

import os
from typing import Any

from ray_lance_stream.block import BlockRecipe
from ray_lance_stream.config import PrefetchConfig, StreamConfig
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.gone import when_gone
from ray_lance_stream.local import LocalSource
from ray_lance_stream.plan import TableIdentity
from ray_lance_stream.readable import check_identity
from ray_lance_stream.source import BlockSource
from ray_lance_stream.topology import Seat


class RowSource:
    """Opens a block source at first use, and closes it with the dataset it belongs to.

    Args:
        config: The stream.
        recipe: What blocks are made of.
        num_threads: Threads that build blocks in this process.
    """

    def __init__(self, config: StreamConfig, recipe: BlockRecipe, num_threads: int) -> None:
        self._config = config
        self._recipe = recipe
        self._num_threads = num_threads
        self.num_prefetchers = 0
        self._opened: tuple[int, BlockSource, Any] | None = None  # by this process; its source, and its link

    def __getstate__(self) -> dict[str, Any]:
        # Threads and actors belong to the process that started them.
        return self.__dict__ | {"_opened": None}

    @property
    def is_local(self) -> bool:
        """Whether blocks are built in this process."""
        return not self.num_prefetchers

    @property
    def rows_in_transform(self) -> int:
        """Rows that are read and not yet transformed, where that can be seen: in this process."""
        return getattr(self._opened[1], "rows_in_transform", 0) if self._opened else 0

    def use_prefetchers(self, count: int, world_size: int) -> None:
        """Has blocks built by so many Ray actors from now on; 0 for threads of this process.

        Raises:
            ConfigError: Ray is not running, and each of several ranks would start one of its own; or the transform
                cannot be sent to the prefetchers.
        """
        if count > 0:
            _check_picklable(self._recipe)
            _join_ray(world_size)
        if count != self.num_prefetchers:
            self.close()
            self.num_prefetchers = count

    def check_table(self, identity: TableIdentity) -> None:
        """Raises StateMismatchError or TableVersionError if the table does not have this version, or another one."""
        if identity != self._config.identity:
            check_identity(self._recipe.table.open(identity.version), identity, self._recipe.table)

    def open(self) -> BlockSource:
        """Returns the source."""
        if self._opened is not None and self._opened[0] == os.getpid():
            return self._opened[1]
        if not self.num_prefetchers:
            source: BlockSource = LocalSource(self._recipe, num_threads=self._num_threads)
            self._opened = (os.getpid(), source, None)
            return source
        link, source = self._start_prefetchers()
        self._opened = (os.getpid(), source, link)
        when_gone(self, link.close)
        return source

    def close(self) -> None:
        """Ends the threads or actors."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()
            if opened[2] is not None:
                opened[2].close()

    def _start_prefetchers(self) -> tuple[Any, BlockSource]:
        import dataclasses

        from ray import cloudpickle

        from ray_lance_stream.cluster.parcel import Parcel
        from ray_lance_stream.cluster.session import RayLink, start_session

        prefetch: PrefetchConfig = dataclasses.replace(self._config.prefetch, num_actors=self.num_prefetchers)
        config = dataclasses.replace(self._config, prefetch=prefetch)
        dumps: Any = cloudpickle.dumps  # untyped
        session = start_session(config, Parcel.of(dumps(self._recipe)))
        try:
            seat = Seat(incarnation=session.begin())
            link = RayLink(session, owned=True)
            link.hold()
            return link, link.open_source(config, seat)
        except BaseException:
            session.kill()
            raise


def _check_picklable(recipe: BlockRecipe) -> None:
    from ray import cloudpickle

    if recipe.transform is not None:
        dumps: Any = cloudpickle.dumps  # untyped
        recipe.transform.validate_picklable(dumps)


def _join_ray(world_size: int) -> None:
    import ray

    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    elif world_size == 1:
        ray.init(address="local")
    else:
        raise ConfigError(
            explain(
                "prefetchers need a Ray cluster that all ranks share",
                found=f"a process without Ray, one of world_size={world_size}",
                expected="every rank connected to the same cluster",
                remedy="start one (ray start --head) and call ray.init(address='auto') in every rank before, or pass "
                "num_workers=0",
            )
        )
