"""State: how far each split has been consumed by the trainer, and what it was consumed from.

The keys are those of LanceDB's ``StreamingDataset`` plus ``format`` and ``provenance``; every value is a
plain JSON type. At a step boundary the states of all replicas are equal, so any of them is complete.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.counts import SplitCounts, malformed, read_count
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError, explain, shown
from ray_lance_stream.plan import OrderSpec, TableIdentity

logger = logging.getLogger("ray_lance_stream")
STATE_FORMAT: Final = 1
# What a user may override, field by field. num_splits is not among them: counts of other splits mean nothing.
OVERRIDABLE_FIELDS: Final = ("filter", "order", "plan_digest", "shuffle", "shuffle_clump_size", "shuffle_seed", "table")

_SEED, _SPLITS, _EPOCH = "shuffle_seed", "num_splits", "epoch"
_SAMPLES, _POSITIONS = "samples_consumed_per_split", "positions_consumed_per_split"
_FORMAT, _PROVENANCE = "format", "provenance"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a state was consumed from."""

    table: TableIdentity
    order: OrderSpec


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A place in a stream.

    Attributes:
        provenance: What the rows come from.
        epoch: The epoch the counts belong to.
        samples: Rows of each split that the trainer was handed.
        positions: Position each split has reached; larger than ``samples`` where rows were skipped.
    """

    provenance: Provenance
    epoch: int
    samples: SplitCounts
    positions: SplitCounts

    @classmethod
    def at_cycle(cls, provenance: Provenance, epoch: int, cycle: int) -> StreamState:
        """Returns the state in which every split has given its first ``cycle`` rows."""
        counts = SplitCounts(num_splits=provenance.order.num_splits, base=cycle)
        return cls(provenance=provenance, epoch=epoch, samples=counts, positions=counts)

    @property
    def completed_cycles(self) -> int:
        """Cycles of which the trainer has every row."""
        return self.samples.least

    def to_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Returns plain JSON types; counts as lists like LanceDB's, or in the compact form."""
        table, order = self.provenance.table, self.provenance.order
        provenance = {
            "table_version": table.version,
            "table_fingerprint": table.fingerprint,
            "filter": order.filter,
            "order": order.order,
            "shuffle": order.shuffle,
            "shuffle_clump_size": order.shuffle_clump_size,
            "plan_format": order.plan_format,
            "pack_sequences": None,
        }
        if order.plan_digest is not None:
            provenance["plan_digest"] = order.plan_digest
        return {
            _FORMAT: STATE_FORMAT,
            _SEED: order.shuffle_seed,
            _SPLITS: order.num_splits,
            _EPOCH: self.epoch,
            _SAMPLES: self.samples.to_json() if compact else self.samples.to_list(),
            _POSITIONS: self.positions.to_json() if compact else self.positions.to_list(),
            _PROVENANCE: provenance,
        }

    @classmethod
    def from_dict(cls, state: object, *, of: Provenance | None = None) -> StreamState:
        """Reads a state dict, checking every value.

        Args:
            state: What ``state_dict()`` returned, ours or that of ``lancedb.streaming``.
            of: What a state without provenance is taken to belong to, if its seed and ``num_splits`` do not say
                otherwise; only a stream with ``order="lancedb"`` can continue one.

        Raises:
            StateError: It is not a state, is damaged, or carries no provenance.
        """
        if not isinstance(state, Mapping) or not state:
            raise StateError(
                explain(
                    "this is not a stream state",
                    found=f"a {type(state).__name__}" if not isinstance(state, Mapping) else "an empty dict",
                    expected="the dict that state_dict() returned",
                    remedy="pass that dict, or the path of a checkpoint",
                )
            )
        version = _get(state, _FORMAT, int) if _FORMAT in state else None
        if version is None and _SAMPLES in state:
            return cls._from_foreign(state, of)
        if version != STATE_FORMAT:
            raise StateError(
                explain(
                    "the state's format is unknown",
                    found=shown(version),
                    expected=repr(STATE_FORMAT),
                    remedy="use the version of ray_lance_stream that wrote it",
                )
            )
        return cls._read_counts(state, _read_provenance(state))

    @classmethod
    def _from_foreign(cls, state: Mapping[str, Any], of: Provenance | None) -> StreamState:
        if of is None or of.order.order != "lancedb":
            raise StateError(
                explain(
                    "the state does not say what data it belongs to",
                    found="no provenance, as lancedb.streaming writes it",
                    expected="a state of ray_lance_stream" if of is None else "a stream with order='lancedb'",
                    remedy="pass order='lancedb' to continue it; other orders cannot",
                )
            )
        try:
            order = dataclasses.replace(
                of.order, num_splits=_get(state, _SPLITS, int), shuffle_seed=_get(state, _SEED, int)
            )
        except ConfigError as error:
            raise StateError(f"the state is damaged: {error}") from error
        logger.warning(
            "continuing a state without provenance, of lancedb.streaming: num_splits, seed and epoch are checked; that "
            "table version %d, filter %r, shuffle=%s and shuffle_clump_size=%d are those it was taken with is not",
            *(of.table.version, order.filter, order.shuffle, order.shuffle_clump_size),
        )
        return cls._read_counts({_POSITIONS: state[_SAMPLES], **state}, dataclasses.replace(of, order=order))

    @classmethod
    def _read_counts(cls, state: Mapping[str, Any], provenance: Provenance) -> StreamState:
        num_splits = provenance.order.num_splits
        samples = SplitCounts.from_json(_SAMPLES, state.get(_SAMPLES), num_splits)
        positions = SplitCounts.from_json(_POSITIONS, state.get(_POSITIONS), num_splits)
        if any(p < s for p, s in zip(positions.to_list(), samples.to_list(), strict=True)):
            raise malformed(_POSITIONS, "a position before the samples already consumed")
        return cls(
            provenance=provenance, epoch=read_count(_EPOCH, state.get(_EPOCH)), samples=samples, positions=positions
        )


def merge_states(states: Sequence[StreamState]) -> StreamState:
    """Returns the one state that several replicas' states make.

    Raises:
        StateError: There is none, or the replicas have completed different numbers of cycles.
        StateMismatchError: They belong to other data or epochs.
    """
    if not states:
        raise StateError("there is no state to merge. Expected: one state per replica. Remedy: pass them all.")
    first = states[0]
    for other in states[1:]:
        for name, (a, b) in _differences(first.provenance, other.provenance).items():
            raise StateMismatchError(_mismatch_text(name, a, b, "merge states of one run only"), name, a, b)
        if other.epoch != first.epoch:
            text = _mismatch_text(_EPOCH, first.epoch, other.epoch, "merge states of one step only")
            raise StateMismatchError(text, _EPOCH, first.epoch, other.epoch)
    cycles = [state.completed_cycles for state in states]
    if len(set(cycles)) > 1:
        raise StateError(
            explain(
                "the replicas have completed different numbers of cycles; merging them would lose rows",
                found=", ".join(f"state {i}: {cycle}" for i, cycle in enumerate(cycles)),
                expected="the same number",
                remedy="take every replica's state after the same step",
            )
        )
    samples, positions = first.samples, first.positions
    for other in states[1:]:
        samples, positions = samples.maximum(other.samples), positions.maximum(other.positions)
    return dataclasses.replace(first, samples=samples, positions=positions)


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the state dicts of several replicas, taken after the same step, into one.

    Args:
        states: One ``state_dict()`` per replica, in any order.

    Returns:
        A state dict that continues the run at any number of replicas.

    Raises:
        StateError: No state, a damaged one, or replicas at different steps.
        StateMismatchError: The states belong to different data; the message names the field.
    """
    return merge_states([StreamState.from_dict(state) for state in states]).to_dict()


def reconcile(
    saved: Provenance, order: OrderSpec, *, seed_given: bool = True, allow_changes: Collection[str] = ()
) -> OrderSpec:
    """Returns the order a stream goes on with when it loads a state.

    Args:
        saved: What the state belongs to.
        order: What the stream was built for.
        seed_given: False if the user let the seed be drawn; then the saved one is taken.
        allow_changes: Fields in which the stream may differ from the state; its own value then holds.

    Raises:
        StateMismatchError: A field differs and may not.
    """
    check_overrides(allow_changes)
    adopted = dataclasses.replace(order, shuffle_seed=saved.order.shuffle_seed) if not seed_given else order
    current = Provenance(table=saved.table, order=adopted)
    for name, (was, now) in _differences(saved, current).items():
        if name in allow_changes:
            continue
        can_override = name in OVERRIDABLE_FIELDS
        remedy = f"build the stream with {name}={was!r}" + (
            f", or build it with allow_changes=({name!r},) if another order from here on is what you want"
            if can_override
            else ""
        )
        raise StateMismatchError(_mismatch_text(name, was, now, remedy), name, was, now)
    return adopted


def check_overrides(allow_changes: Collection[str]) -> None:
    """Raises ConfigError if a field is named that does not exist or cannot change."""
    unknown = [name for name in allow_changes if name not in OVERRIDABLE_FIELDS]
    if isinstance(allow_changes, str) or unknown:
        raise ConfigError(
            explain(
                "allow_changes is not valid",
                found=repr(allow_changes),
                expected=f"a tuple of names out of {OVERRIDABLE_FIELDS}",
                remedy="name only the fields that differ on purpose",
            )
        )


def _differences(a: Provenance, b: Provenance) -> dict[str, tuple[object, object]]:
    """Returns {field: (a's value, b's value)} for the fields that differ, in a fixed order."""
    fields: dict[str, tuple[object, object]] = {
        spec.name: (getattr(a.order, spec.name), getattr(b.order, spec.name)) for spec in dataclasses.fields(OrderSpec)
    }
    fields["table"] = (a.table, b.table)
    if not a.order.shuffle and not b.order.shuffle:  # neither matters to an unshuffled order
        del fields["shuffle_seed"], fields["shuffle_clump_size"]
    return {name: (was, now) for name, (was, now) in fields.items() if was != now}


def _mismatch_text(name: str, was: object, now: object, remedy: str) -> str:
    return explain(
        f"{name} differs: the state belongs to other data", found=f"{now!r}", expected=f"{was!r}", remedy=remedy
    )


def _read_provenance(state: Mapping[str, Any]) -> Provenance:
    saved = _get(state, _PROVENANCE, Mapping)
    filter_text = saved.get("filter")
    if filter_text is not None and not isinstance(filter_text, str):
        raise malformed("filter", filter_text)
    if saved.get("pack_sequences") is not None:
        raise malformed("pack_sequences", saved["pack_sequences"])
    try:
        order = OrderSpec(
            num_splits=_get(state, _SPLITS, int),
            shuffle=_get(saved, "shuffle", bool),
            shuffle_seed=_get(state, _SEED, int),
            shuffle_clump_size=_get(saved, "shuffle_clump_size", int),
            filter=filter_text,
            order=_get(saved, "order", str),
            plan_format=_get(saved, "plan_format", int),
            plan_digest=None if saved.get("plan_digest") is None else _get(saved, "plan_digest", str),
        )
    except ConfigError as error:
        raise StateError(f"the state is damaged: {error}") from error
    table = TableIdentity(
        version=read_count("table_version", saved.get("table_version")),
        fingerprint=_get(saved, "table_fingerprint", str),
    )
    return Provenance(table=table, order=order)


def _get(mapping: Mapping[str, Any], key: str, kind: type) -> Any:
    value = mapping.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise malformed(key, value)
    return value
