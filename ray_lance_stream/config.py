"""The validated settings of a stream. They describe; nothing here opens, starts or reads anything."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from ray_lance_stream.diskcache import CacheSpec
from ray_lance_stream.errors import ConfigError, MissingStateError, StateMismatchError, explain, shown
from ray_lance_stream.packspec import Packing
from ray_lance_stream.plan import OrderSpec, TableIdentity, require_int
from ray_lance_stream.provenance import Provenance, check_overrides, reconcile, reconcile_skips
from ray_lance_stream.state import StreamState
from ray_lance_stream.stepskips import NO_SKIPS, Skips, StepRange

MIB: Final = 1024 * 1024
POOL_LABEL: Final = {"pool": "data"}


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """The pool of prefetchers and what it may use. Changes speed and memory, never the order of rows.

    Attributes:
        num_actors: Prefetchers, 1 or more; or (min, max): it starts with min, more are started while training workers
            wait for blocks and requests queue, and they end again when they have long had little to do. There are
            never more than blocks under way within ``max_buffer_bytes``: others would find nothing to build.
        num_cpus: CPUs Ray reserves for each. The default, 0, reserves none: training workers find the
            CPUs they ask for, and the prefetchers use what is idle. Give 1 on nodes kept for data: then Ray's
            autoscaler also adds such nodes for prefetchers that find no room, and removes them after those.
        resources: Custom Ray resources of each prefetcher.
        label_selector: Ray node labels, e.g. ``{"pool": "data"}``. Without one, and without
            ``resources``, prefetchers go to nodes labelled ``pool=data`` if there are any, else to CPU
            nodes, else to any node with CPUs.
        runtime_env: Ray runtime environment of the prefetchers; by default the job's. No place for credentials: Ray
            lists it to whoever asks.
        max_buffer_bytes: Most bytes of blocks requested and not yet handed over, for the whole stream;
            each training worker gets an equal part. Exceptions: a worker may always have one block and the
            blocks of the step under way; blocks not yet built count at their expected size, so that rows
            which suddenly grow overshoot once, by the blocks being built at that moment. What building takes
            besides, in a prefetcher or a thread of this process, is two or three times a block for each of two
            blocks at a time, and what the transform itself allocates.
        block_bytes: Size blocks grow to, the first ones being smaller. Where the transform takes long for a row,
            they are no larger than it can do in two seconds.
        placement_timeout_s: How long to wait for the first prefetcher to start.
        idle_timeout_s: After so long without a living consumer the stream's actors end by themselves.
        retry_window_s: How long a block is asked for again after losses before that is an error.
        cache_bytes: Most bytes of the table's files that each node keeps on a disk of its own, for all that read there;
            0 for none. For storage that is far away: the files of fragments that are read are fetched whole, once for a
            node, and read from there from then on. What fits is kept; the rest is read from the storage as before.
            Credentials are not kept, rows are: give a directory that only this user can read.
        cache_dir: The directory below which it lies, on a fast disk; it outlives the run, and a later one finds it. By
            default one among the system's temporary ones. Checksums are kept beside the files: what was changed since
            is fetched anew.
        shrink_after_s: With ``num_actors=(min, max)``: how long buffers must have been full before prefetchers end.
            Doubles, up to ten minutes, whenever those that ended were needed again.
    """

    num_actors: int | tuple[int, int] = 2
    num_cpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    label_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold credentials
    max_buffer_bytes: int = 256 * MIB
    block_bytes: int = 32 * MIB
    placement_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0
    retry_window_s: float = 60.0
    shrink_after_s: float = 30.0
    cache_bytes: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_actors, tuple):
            _require_bounds("num_actors", self.num_actors)
        else:
            require_int("num_actors", self.num_actors, minimum=1, remedy="pass 1 or more prefetchers, or (min, max)")
        for name in ("max_buffer_bytes", "block_bytes"):
            require_int(name, getattr(self, name), minimum=1, maximum=2**62, remedy="pass a number of bytes")
        require_int("cache_bytes", self.cache_bytes, minimum=0, maximum=2**62, remedy="pass a number of bytes, or 0")
        if self.cache_dir is not None and not (isinstance(self.cache_dir, str) and os.path.isabs(self.cache_dir)):
            raise ConfigError(
                explain(
                    "cache_dir is not valid",
                    found=shown(self.cache_dir),
                    expected="the absolute path of a directory on each node",
                    remedy="pass one as a string, or leave it out",
                )
            )
        _require_number("num_cpus", self.num_cpus, least=0)
        for name in ("placement_timeout_s", "idle_timeout_s", "retry_window_s", "shrink_after_s"):
            _require_number(name, getattr(self, name), least=0.1)
        _require_mapping("resources", self.resources, "amounts by name", lambda v: _is_number(v) and v >= 0)
        _require_mapping("label_selector", self.label_selector, "strings by label", lambda v: isinstance(v, str))
        if self.runtime_env is not None:
            _require_mapping("runtime_env", self.runtime_env, "fields of a Ray runtime environment", lambda _: True)

    @property
    def cache(self) -> CacheSpec | None:
        """Where nodes keep files of the table, if they do."""
        return CacheSpec(directory=self.cache_dir, max_bytes=self.cache_bytes) if self.cache_bytes else None

    @property
    def min_actors(self) -> int:
        """The fewest prefetchers, with which the pool starts."""
        return self.num_actors[0] if isinstance(self.num_actors, tuple) else self.num_actors

    @property
    def max_actors(self) -> int:
        """The most prefetchers."""
        return self.num_actors[1] if isinstance(self.num_actors, tuple) else self.num_actors


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Everything a shard needs to know of its stream; small, picklable, the same for all shards.

    What blocks are made of is not here: a training worker never opens the table.
    """

    stream_id: str
    identity: TableIdentity
    order: OrderSpec
    global_batch_size: int
    drop_last: bool = False
    seed_given: bool = True
    pinned_version: int | None = None
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    resume_states: Mapping[str, StreamState] | None = None
    on_missing_state: Literal["error", "restart"] = "error"
    allow_changes: tuple[str, ...] = ()
    sifts: bool = False  # blocks say which of their rows came through, because some may fail
    packing: Packing | None = None  # how rows become blocks of tokens, their number known
    blocks_given: bool = True  # False if that number is an estimate; then a state brings its own
    skip_steps: tuple[StepRange, ...] | None = None  # None: those that a state names

    def __post_init__(self) -> None:
        check_overrides(self.allow_changes)
        if not isinstance(self.drop_last, bool):
            raise ConfigError(
                explain(
                    "drop_last is not valid",
                    found=shown(self.drop_last),
                    expected="True or False",
                    remedy="pass one, or leave it out",
                )
            )
        if not isinstance(self.prefetch, PrefetchConfig):
            raise ConfigError(
                explain(
                    "prefetch is not valid",
                    found=f"an object of type {type(self.prefetch).__name__}",
                    expected="a PrefetchConfig",
                    remedy="pass prefetch=PrefetchConfig(num_actors=...)",
                )
            )
        if self.on_missing_state not in ("error", "restart"):
            raise ConfigError(
                explain(
                    "on_missing_state is not valid",
                    found=repr(self.on_missing_state),
                    expected="'error' or 'restart'",
                    remedy="keep the default unless a checkpoint without stream state is meant to start over",
                )
            )

        if self.skip_steps and self.is_uneven:
            raise self._cannot_skip(f"skip_steps={list(self.skip_steps)}")

    def _cannot_skip(self, found: str) -> ConfigError:
        what = "pack_sequences" if self.packing is not None else "on_transform_error"
        return ConfigError(
            explain(
                f"skip_steps does not go with {what}: what a step holds depends on the rows of all steps before it",
                found=found,
                expected="a stream of rows that are neither packed nor left out one by one",
                remedy=f"leave skip_steps or {what} out",
            )
        )

    @property
    def is_uneven(self) -> bool:
        """Whether splits are consumed unevenly, so that a replica knows its own splits' place only."""
        return self.sifts or self.packing is not None

    @property
    def provenance(self) -> Provenance:
        """What the stream reads, if no state says otherwise."""
        return Provenance(table=self.identity, order=self.order, packing=self.packing, skips=self.skips or NO_SKIPS)

    @property
    def skips(self) -> Skips | None:
        """The cycles of ``skip_steps``; None where that says nothing."""
        if self.skip_steps is None:
            return None
        return Skips.of_steps(self.skip_steps, self.global_batch_size // self.order.num_splits)

    def skips_from(self, state: StreamState) -> Skips:
        """Returns what is left out from a state on, and what was before.

        Raises:
            StateMismatchError: The state did not leave out what lies behind it, or left out more.
            ConfigError: Steps are left out, and the stream skips rows or packs them.
        """
        place = {"epoch": state.epoch, "cycle": state.completed_cycles}
        skips = reconcile_skips(state.provenance.skips, self.skips, **place, allow_changes=self.allow_changes)
        if self.is_uneven and skips.since(**place):
            raise self._cannot_skip("a state that names steps ahead of it")
        return skips

    def continued(self, saved: Provenance) -> Provenance:
        """Returns what the stream reads from a state on; what the user left open is the state's.

        Raises:
            StateMismatchError: The state belongs to other data than the stream.
        """
        packing = self.packing
        if packing is not None and saved.packing is not None and not self.blocks_given:
            packing = replace(packing, blocks_per_epoch=saved.packing.blocks_per_epoch)
        order = reconcile(
            saved, self.order, packing=packing, seed_given=self.seed_given, allow_changes=self.allow_changes
        )
        table = self.identity if "table" in self.allow_changes else saved.table
        if self.pinned_version not in (None, table.version):
            raise StateMismatchError(
                explain(
                    "table version differs: the stream is pinned to another one",
                    found=f"version={self.pinned_version}",
                    expected=f"{saved.table.version}, from which the state was taken",
                    remedy="leave version unset to continue on the state's version, "
                    "or pass allow_changes=('table',) to go on with other data",
                ),
                "table",
                saved.table,
                self.identity,
            )
        return Provenance(table=table, order=order, packing=packing)

    def state_for(self, name: str, states: Mapping[str, StreamState] | None, where: str) -> StreamState | None:
        """Picks this stream's state out of a checkpoint's.

        Args:
            name: The stream's name in the run.
            states: The checkpoint's states by name; None if it holds no file of ours.
            where: The checkpoint, for the error.

        Raises:
            MissingStateError: It is not there, and ``on_missing_state`` is "error".
        """
        if states and name in states:
            return states[name]
        if self.on_missing_state == "restart":
            return None
        raise MissingStateError(
            explain(
                f"the checkpoint {where} holds no state of the stream {name!r}",
                found=f"states of {sorted(states)}" if states else "no lance_stream.json",
                expected="a checkpoint written by ray_lance_stream.report() or with save_state()",
                remedy="resume from a checkpoint that has one, or pass on_missing_state='restart' to begin anew",
            )
        )


def override_names(allow_changes: object) -> tuple[str, ...]:
    """Returns the fields that ``allow_changes`` names; raises ConfigError if it names none that may change."""
    names = (allow_changes,) if isinstance(allow_changes, str) else allow_changes
    if not isinstance(names, Collection):
        raise ConfigError(
            explain(
                "allow_changes is not valid",
                found=shown(allow_changes),
                expected="a tuple of names of fields",
                remedy="name the fields that differ on purpose, e.g. ('filter',), or leave it out",
            )
        )
    check_overrides(tuple(names))
    return tuple(names)


def _require_bounds(name: str, value: tuple[object, ...]) -> None:
    whole = [isinstance(item, int) and not isinstance(item, bool) for item in value]
    if len(value) == 2 and all(whole) and 1 <= value[0] <= value[1]:  # type: ignore[operator]
        return
    raise ConfigError(
        explain(
            f"{name} is not valid",
            found=shown(value),
            expected="two integers (min, max), 1 <= min <= max",
            remedy="pass the fewest and the most prefetchers, e.g. (1, 8), or one number",
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_mapping(name: str, value: object, expected: str, is_valid: Callable[[Any], bool]) -> None:
    if isinstance(value, Mapping) and all(isinstance(key, str) and is_valid(item) for key, item in value.items()):
        return
    # Only the type of a foreign value: a runtime environment may hold credentials.
    found = f"a {type(value).__name__}" + ("" if not isinstance(value, Mapping) else f" with keys {list(value)}")
    raise ConfigError(
        explain(f"{name} is not valid", found=found, expected=f"a dict of {expected}", remedy="pass a dict")
    )


def _require_number(name: str, value: object, *, least: float) -> None:
    if _is_number(value) and value >= least:  # type: ignore[operator]
        return
    raise ConfigError(
        explain(f"{name} is not valid", found=repr(value), expected=f"a number >= {least}", remedy="pass one")
    )
