"""What a state was consumed from: how that is saved and read, and what happens where it differs from a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.counts import malformed, read_count
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError, explain, shown
from ray_lance_stream.packspec import Packing
from ray_lance_stream.plan import OrderSpec, TableIdentity, whole
from ray_lance_stream.stepskips import NO_SKIPS, Skips

# What a user may override, field by field. num_splits is not among them: counts of other splits mean nothing.
OVERRIDABLE_FIELDS: Final = (
    "filter",
    "order",
    "plan_digest",
    "shuffle",
    "shuffle_clump_size",
    "shuffle_seed",
    "skip_steps",
    "table",
)
PACKING_FIELDS: Final = ("pack_sequences", "eos_id", "pad_id", "blocks_per_epoch")
_SHOWN: Final = 400  # characters of a value that differs
_SKIPPED: Final = "skipped_cycles"  # states of runs that left no step out do not have it


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a state was consumed from.

    Attributes:
        table: The table version.
        order: The order of its rows.
        packing: How they become blocks, its number of blocks known; None for rows that are not packed.
        skips: What was and what is to be left out of it, whole steps.
    """

    table: TableIdentity
    order: OrderSpec
    packing: Packing | None = None
    skips: Skips = NO_SKIPS

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON types: all but ``num_splits`` and the seed, which a state says itself."""
        table, order, packing = self.table, self.order, self.packing
        saved = {
            "table_version": table.version,
            "table_fingerprint": table.fingerprint,
            "filter": order.filter,
            "order": order.order,
            "shuffle": order.shuffle,
            "shuffle_clump_size": order.shuffle_clump_size,
            "plan_format": order.plan_format,
            "pack_sequences": None if packing is None else packing_to_dict(packing),
        }
        if order.plan_digest is not None:
            saved["plan_digest"] = order.plan_digest
        if self.skips:
            saved[_SKIPPED] = self.skips.to_json()
        return saved

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], *, num_splits: int, shuffle_seed: int) -> Provenance:
        """Reads what :meth:`to_dict` returned.

        Raises:
            StateError: It is damaged.
        """
        filter_text = saved.get("filter")
        if filter_text is not None and not isinstance(filter_text, str):
            raise malformed("filter", filter_text)
        packing = saved.get("pack_sequences")
        try:
            order = OrderSpec(
                num_splits=num_splits,
                shuffle=get(saved, "shuffle", bool),
                shuffle_seed=shuffle_seed,
                shuffle_clump_size=get(saved, "shuffle_clump_size", int),
                filter=filter_text,
                order=get(saved, "order", str),
                plan_format=get(saved, "plan_format", int),
                plan_digest=None if saved.get("plan_digest") is None else get(saved, "plan_digest", str),
            )
        except ConfigError as error:
            raise StateError(f"the state is damaged: {error}") from error
        table = TableIdentity(
            version=read_count("table_version", saved.get("table_version")),
            fingerprint=get(saved, "table_fingerprint", str),
        )
        return cls(
            table=table,
            order=order,
            packing=None if packing is None else packing_from_dict(packing, num_splits),
            skips=Skips.from_json(_SKIPPED, saved[_SKIPPED]) if _SKIPPED in saved else NO_SKIPS,
        )


def packing_to_dict(packing: Packing) -> dict[str, Any]:
    """Returns how documents become blocks, under LanceDB's keys."""
    return {name: getattr(packing, name) for name in PACKING_FIELDS}


def packing_from_dict(saved: object, num_splits: int) -> Packing:
    """Reads what :func:`packing_to_dict` returned, or a packed state of LanceDB, which has the same keys.

    Raises:
        StateError: It is damaged.
    """
    if not isinstance(saved, Mapping):
        raise malformed("pack_sequences", saved)
    fields = {name: get(saved, name, int) for name in PACKING_FIELDS}
    try:
        return Packing(num_splits=num_splits, **fields)
    except ConfigError as error:
        raise StateError(f"the state is damaged: {error}") from error


def reconcile(
    saved: Provenance,
    order: OrderSpec,
    *,
    packing: Packing | None = None,
    seed_given: bool = True,
    allow_changes: Collection[str] = (),
) -> OrderSpec:
    """Returns the order a stream goes on with when it loads a state.

    Args:
        saved: What the state belongs to.
        order: What the stream was built for.
        packing: How it packs, if it does; no difference is allowed.
        seed_given: False if the user let the seed be drawn; then the saved one is taken.
        allow_changes: Fields in which the stream may differ from the state; its own value then holds.

    Raises:
        StateMismatchError: A field differs and may not.
    """
    check_overrides(allow_changes)
    adopted = dataclasses.replace(order, shuffle_seed=saved.order.shuffle_seed) if not seed_given else order
    current = Provenance(table=saved.table, order=adopted, packing=packing, skips=saved.skips)
    for name, (was, now) in differences(saved, current).items():
        if name in allow_changes:
            continue
        can_override = name in OVERRIDABLE_FIELDS
        remedy = f"build the stream with {name}={shown(was, _SHOWN)}" + (
            f", or build it with allow_changes=({name!r},) if another order from here on is what you want"
            if can_override
            else ""
        )
        raise StateMismatchError(mismatch_text(name, was, now, remedy), name, was, now)
    return adopted


def reconcile_skips(
    saved: Skips, given: Skips | None, *, epoch: int, cycle: int, allow_changes: Collection[str] = ()
) -> Skips:
    """Returns which steps a stream leaves out when it loads a state.

    What lies ahead of the state is the stream's to say: naming steps is explicit already, and no row that was
    consumed becomes another one. What lies behind is what happened: a stream that names steps which were delivered
    would seem to leave them out and does not.

    Args:
        saved: What the state says.
        given: What the stream says; None if nothing, and then the state's hold.
        epoch: The epoch of the state.
        cycle: Its cycle.
        allow_changes: Fields in which the stream may differ from the state; of what lies behind the state's hold.

    Raises:
        StateMismatchError: They differ in what lies behind the state.
    """
    if given is None:
        return saved
    was, now = saved.before(epoch, cycle), given.before(epoch, cycle)
    if was != now and "skip_steps" not in allow_changes:
        missing, extra = _without(was, now), _without(now, was)
        raise StateMismatchError(
            explain(
                "skip_steps differs in steps that lie behind the state",
                found="; ".join(
                    filter(None, (_cycles(extra, "delivered"), _cycles(missing, "left out and not named")))
                ),
                expected="the steps that were left out up to the state, and any that lie ahead of it",
                remedy="resume from a checkpoint before the steps, or name what was left out as well "
                "(ray-lance-stream inspect shows it), or build the stream with allow_changes=('skip_steps',) to go on",
            ),
            "skip_steps",
            was.ranges,
            now.ranges,
        )
    return was | given.since(epoch, cycle)


def _without(some: Skips, others: Skips) -> tuple[tuple[int, int, int], ...]:
    return tuple(entry for entry in some.ranges if entry not in others.ranges)


def _cycles(ranges: Collection[tuple[int, int, int]], what: str) -> str:
    return ", ".join(f"cycles {start} to {stop - 1} of epoch {epoch}" for epoch, start, stop in ranges) + (
        f" {what}" if ranges else ""
    )


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


def differences(a: Provenance, b: Provenance) -> dict[str, tuple[object, object]]:
    """Returns {field: (a's value, b's value)} for the fields that differ, in a fixed order."""
    fields: dict[str, tuple[object, object]] = {
        spec.name: (getattr(a.order, spec.name), getattr(b.order, spec.name)) for spec in dataclasses.fields(OrderSpec)
    }
    fields["table"] = (a.table, b.table)
    fields["skip_steps"] = (a.skips.ranges, b.skips.ranges)
    if a.packing is not None and b.packing is not None:
        fields |= {name: (getattr(a.packing, name), getattr(b.packing, name)) for name in PACKING_FIELDS}
    else:
        fields["pack_sequences"] = (a.packing and a.packing.pack_sequences, b.packing and b.packing.pack_sequences)
    if not a.order.shuffle and not b.order.shuffle:  # neither matters to an unshuffled order
        del fields["shuffle_seed"], fields["shuffle_clump_size"]
    return {name: (was, now) for name, (was, now) in fields.items() if was != now}


def mismatch_text(name: str, was: object, now: object, remedy: str) -> str:
    """Returns the message of a StateMismatchError."""
    return explain(
        f"{name} differs: the state belongs to other data",
        found=shown(now, _SHOWN),
        expected=f"{shown(was, _SHOWN)}, as the state says",
        remedy=remedy,
    )


def get(mapping: Mapping[str, Any], key: str, kind: type) -> Any:
    """Returns a value of a saved mapping; raises StateError if it is not of a kind."""
    value = whole(mapping.get(key)) if kind is int else mapping.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise malformed(key, value)
    return value
