"""State: how far each split has been consumed by the trainer, and what it was consumed from.

The keys are those of LanceDB's ``StreamingDataset`` plus ``format`` and ``provenance``; every value is a
plain JSON type. At a step boundary the states of all replicas are equal, so any of them is complete.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.counts import SplitCounts, malformed, read_count
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError, explain, shown
from ray_lance_stream.packstate import (
    PACK_OFFSETS,
    SplitCursor,
    cursors_from_json,
    cursors_from_lancedb,
    cursors_to_json,
    cursors_to_lancedb,
    merge_cursors,
)
from ray_lance_stream.plan import OrderSpec, TableIdentity
from ray_lance_stream.provenance import (
    Provenance,
    differences,
    get,
    mismatch_text,
    packing_from_dict,
    packing_to_dict,
)

logger = logging.getLogger("ray_lance_stream")
STATE_FORMAT: Final = 1

_SEED, _SPLITS, _EPOCH = "shuffle_seed", "num_splits", "epoch"
_SAMPLES, _POSITIONS = "samples_consumed_per_split", "positions_consumed_per_split"
_EMITTED, _BUFFERS = "blocks_emitted_per_split", "pack_buffers"
_FORMAT, _PROVENANCE = "format", "provenance"
_MAX_SHOWN: Final = 400  # characters of what was found
# What LanceDB's states belong to while they are only merged; num_splits and seed they say themselves.
_UNSAID: Final = Provenance(
    table=TableIdentity(version=1, fingerprint=""), order=OrderSpec(num_splits=1, shuffle_seed=0, order="lancedb")
)


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """A place in a stream.

    Attributes:
        provenance: What the rows come from.
        epoch: The epoch the counts belong to.
        samples: Rows of each split that the trainer was handed.
        positions: Position each split has reached; larger than ``samples`` where rows were skipped.
        packed: Of packed rows, where each split's next block begins; both counts above are the positions of
            documents then.
    """

    provenance: Provenance
    epoch: int
    samples: SplitCounts
    positions: SplitCounts
    packed: tuple[SplitCursor, ...] | None = None

    @classmethod
    def at_cycle(cls, provenance: Provenance, epoch: int, cycle: int) -> StreamState:
        """Returns the state in which every split has given its first ``cycle`` rows."""
        counts = SplitCounts(num_splits=provenance.order.num_splits, base=cycle)
        return cls(provenance=provenance, epoch=epoch, samples=counts, positions=counts)

    @classmethod
    def of_packed(cls, provenance: Provenance, epoch: int, cursors: Sequence[SplitCursor]) -> StreamState:
        """Returns the state in which every split's next block begins at its cursor."""
        documents = SplitCounts.of([cursor.documents for cursor in cursors])
        return cls(provenance=provenance, epoch=epoch, samples=documents, positions=documents, packed=tuple(cursors))

    @property
    def completed_cycles(self) -> int:
        """Cycles of which the trainer has every row, or every block of packed rows."""
        return self.samples.least if self.packed is None else min(cursor.blocks for cursor in self.packed)

    def to_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Returns plain JSON types; counts as lists like LanceDB's, or in the compact form."""
        order = self.provenance.order
        if self.packed is None:
            place: dict[str, Any] = {_POSITIONS: self.positions.to_json() if compact else self.positions.to_list()}
        else:
            place = self._packed_to_dict(compact)
        return {
            _FORMAT: STATE_FORMAT,
            _SEED: order.shuffle_seed,
            _SPLITS: order.num_splits,
            _EPOCH: self.epoch,
            _SAMPLES: self.samples.to_json() if compact else self.samples.to_list(),
            **place,
            _PROVENANCE: self.provenance.to_dict(),
        }

    def _packed_to_dict(self, compact: bool) -> dict[str, Any]:
        """How far a packed state is: as LanceDB says it if that can, which knows no offsets in documents."""
        assert self.packed is not None
        assert self.provenance.packing is not None
        if any(cursor.offset for cursor in self.packed):
            place = cursors_to_json(self.packed)
        else:
            place = cursors_to_lancedb(self.packed)
            # As LanceDB's: one for every split that was begun.
            begun = {split for split, at in enumerate(self.packed) if at.buffer.tokens or (at.blocks and not compact)}
            place[_BUFFERS] = {str(split): buffer for split, buffer in place[_BUFFERS].items() if split in begun}
        del place[_SAMPLES]  # stands there already
        if compact:
            counts = {key: place[key] for key in (_EMITTED, PACK_OFFSETS) if key in place}
            place |= {key: SplitCounts.of(count).to_json() for key, count in counts.items()}
        return packing_to_dict(self.provenance.packing) | place

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
        version = get(state, _FORMAT, int) if _FORMAT in state else None
        if version is None and _is_foreign(state):
            return cls._from_foreign(state, of)
        if version is None and _PROVENANCE in state:
            raise malformed(_FORMAT, None)
        if version is None:
            raise StateError(
                explain(
                    "this is not a stream state",
                    found=f"a dict with the keys {shown(sorted(map(str, state)), _MAX_SHOWN)}",
                    expected="the dict that state_dict() returned",
                    remedy="pass that dict alone, if it is a part of this one",
                )
            )
        if version != STATE_FORMAT:
            raise StateError(
                explain(
                    "the state's format is unknown",
                    found=shown(version),
                    expected=repr(STATE_FORMAT),
                    remedy="use the version of ray_lance_stream that wrote it",
                )
            )
        seed, num_splits = get(state, _SEED, int), get(state, _SPLITS, int)
        saved = get(state, _PROVENANCE, Mapping)
        return cls._read_place(state, Provenance.from_dict(saved, num_splits=num_splits, shuffle_seed=seed))

    @classmethod
    def _from_foreign(cls, state: Mapping[str, Any], of: Provenance | None) -> StreamState:
        if of is None or of.order.order != "lancedb":
            raise StateError(
                explain(
                    "the state does not say what data it belongs to",
                    found="no provenance, as lancedb.streaming writes it",
                    expected="a state of ray_lance_stream" if of is None else "a stream with order='lancedb'",
                    remedy="continue it with order='lancedb', in which it was taken; other orders cannot. On the "
                    "command line say what it belongs to, with --uri and --table; ray-lance-stream inspect shows it "
                    "then, and ray-lance-stream convert IN OUT --to state-dict makes it a state of ours",
                )
            )
        read = cls._of_foreign(state, of)
        order = read.provenance.order
        logger.warning(
            "this state of lancedb.streaming does not say what it was taken from. Its num_splits, seed and epoch are "
            "checked. Not checked: that it was taken from version %d of the table, with filter %r, shuffle=%s and "
            "shuffle_clump_size=%d, as it is continued now. If the table has changed since, check out the version it "
            "had, or pass version= to LanceStream",
            *(of.table.version, order.filter, order.shuffle, order.shuffle_clump_size),
        )
        return read

    @classmethod
    def _of_foreign(cls, state: Mapping[str, Any], of: Provenance) -> StreamState:
        """Reads a state of ``lancedb.streaming`` as one of the data that it is said to belong to."""
        try:
            order = dataclasses.replace(
                of.order, num_splits=get(state, _SPLITS, int), shuffle_seed=get(state, _SEED, int)
            )
        except ConfigError as error:
            raise StateError(f"the state is damaged: {error}") from error
        packing = packing_from_dict(state, order.num_splits) if _BUFFERS in state else None
        return cls._read_place(
            {_POSITIONS: state[_SAMPLES], **state}, dataclasses.replace(of, order=order, packing=packing)
        )

    @classmethod
    def _read_place(cls, state: Mapping[str, Any], provenance: Provenance) -> StreamState:
        num_splits = provenance.order.num_splits
        if provenance.packing is not None:
            read = cursors_from_json if PACK_OFFSETS in state else cursors_from_lancedb
            cursors = read(state, num_splits)
            return cls.of_packed(provenance, read_count(_EPOCH, state.get(_EPOCH)), cursors)
        samples = SplitCounts.from_json(_SAMPLES, state.get(_SAMPLES), num_splits)
        positions = SplitCounts.from_json(_POSITIONS, state.get(_POSITIONS), num_splits)
        if positions.is_behind(samples):
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
        apart = {} if other.provenance == first.provenance else differences(first.provenance, other.provenance)
        for name, (a, b) in apart.items():
            raise StateMismatchError(mismatch_text(name, a, b, "merge states of one run only"), name, a, b)
        if other.epoch != first.epoch:
            text = mismatch_text(_EPOCH, first.epoch, other.epoch, "merge states of one step only")
            raise StateMismatchError(text, _EPOCH, first.epoch, other.epoch)
    packed = [state.packed for state in states if state.packed is not None]
    if packed:
        return StreamState.of_packed(first.provenance, first.epoch, merge_cursors(packed))
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
    samples = SplitCounts.greatest([state.samples for state in states])
    positions = SplitCounts.greatest([state.positions for state in states])
    return dataclasses.replace(first, samples=samples, positions=positions)


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the state dicts of several replicas, taken after the same step, into one.

    Args:
        states: One ``state_dict()`` per replica, in any order; ours, or all of them those of ``lancedb.streaming``.

    Returns:
        A state dict that continues the run at any number of replicas. What was made of LanceDB's states is, as they
        are, one that does not say what data it belongs to.

    Raises:
        StateError: No state, a damaged one, or replicas at different steps.
        StateMismatchError: The states belong to different data; the message names the field.
    """
    if isinstance(states, (str, Mapping)) or not isinstance(states, Iterable):
        raise StateError(
            explain(
                "this is no list of states to merge",
                found=f"a {type(states).__name__}",
                expected="a list with the state_dict() of every replica",
                remedy="pass a list, also of a single state",
            )
        )
    states = list(states)
    foreign = [state for state in states if isinstance(state, Mapping) and _is_foreign(state)]
    if foreign and len(foreign) == len(states):
        return _merge_foreign(foreign)
    return merge_states([StreamState.from_dict(state) for state in states]).to_dict()


def _merge_foreign(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges states of ``lancedb.streaming``."""
    merged = merge_states([StreamState._of_foreign(state, _UNSAID) for state in states]).to_dict()
    return {key: value for key, value in merged.items() if key not in (_FORMAT, _PROVENANCE)}


def _is_foreign(state: Mapping[str, Any]) -> bool:
    """Whether a state is one of ``lancedb.streaming``, which says neither of what form it is nor of what data."""
    return _FORMAT not in state and _PROVENANCE not in state and _SAMPLES in state
