"""Row numbers and addresses of one table version, and the version's fingerprint.

A *row number* is an offset in the version's scan order with deletions applied, 0 to num_rows - 1: fragment
after fragment in manifest order, live rows only. An *address* is Lance's own (fragment id << 32) | offset in
the fragment, deleted rows counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ray_lance_stream.errors import LanceStreamError

if TYPE_CHECKING:
    import lance

_FINGERPRINT_FORMAT: Final = 1
_LEAST_ROWS: Final = 1 << 17  # a MiB, which the system hands out by itself


class RowNumbers:
    """Converts between row numbers and addresses of one version; O(fragments + deleted rows) memory.

    Both go through the *physical* number: the offset in scan order with deleted rows counted.
    """

    def __init__(
        self,
        ids: NDArray[np.int64],
        sizes: NDArray[np.int64],
        counts: NDArray[np.int64],
        deleted: NDArray[np.int64],
    ) -> None:
        """Takes what is known of each fragment, in manifest order, and where deleted rows are.

        Args:
            ids: Fragment ids.
            sizes: Physical rows of each fragment.
            counts: Deleted rows of each fragment.
            deleted: Ascending offsets in the concatenation of the fragments that have deletions.
        """
        self._ids = ids
        self._sizes = sizes
        self._by_id = np.argsort(ids)  # compaction may leave ids that do not ascend
        self._starts = np.cumsum(sizes) - sizes
        touched = counts > 0
        ends = np.cumsum(sizes[touched])
        place = np.searchsorted(ends, deleted, side="right")
        if not np.array_equal(np.bincount(place, minlength=len(ends)), counts[touched]):
            raise LanceStreamError("the deleted rows that Lance scans are not those that the manifest counts")
        self._deleted = deleted + (self._starts[touched] - (ends - sizes[touched]))[place]
        # Number of live rows before each deleted row; ascending, as each counts the same or more.
        self._live_before = self._deleted - np.arange(len(self._deleted))

    def to_addresses(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the addresses of row numbers; int64, same shape."""
        physical = rows + np.searchsorted(self._live_before, rows, side="right")
        place = np.searchsorted(self._starts, physical, side="right") - 1
        addresses: NDArray[np.int64] = (self._ids[place] << 32) + physical - self._starts[place]
        return addresses

    def from_addresses(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the row numbers of live rows' addresses; int64, same shape."""
        fragment = (addresses >> np.uint64(32)).astype(np.int64)
        offset = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        place = self._by_id[np.searchsorted(self._ids, fragment, sorter=self._by_id)]
        physical = self._starts[place] + offset
        return physical - np.searchsorted(self._deleted, physical)

    def has(self, addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns which addresses are those of live rows of the version; same shape."""
        fragment = (addresses >> np.uint64(32)).astype(np.int64)
        offset = (addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        found = np.searchsorted(self._ids, fragment, sorter=self._by_id)
        place = self._by_id[np.minimum(found, len(self._ids) - 1)]
        there: NDArray[np.bool_] = (self._ids[place] == fragment) & (offset < self._sizes[place])
        physical = self._starts[place] + offset
        if len(self._deleted):
            near = np.minimum(np.searchsorted(self._deleted, physical), len(self._deleted) - 1)
            there &= self._deleted[near] != physical
        return there


def gathered(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns row numbers that come in parts as one array; int64, shape (n,).

    Takes 8 bytes a row, and a sixteenth more on the way: parts joined at the end would all be held twice at that
    moment. To make a large array larger the system moves its pages, and copies nothing.
    """
    rows, count = np.empty(_LEAST_ROWS, np.int64), 0
    for part in parts:
        end = count + len(part)
        if end > len(rows):
            rows.resize(max(end, len(rows) + max(_LEAST_ROWS, len(rows) // 16)), refcheck=False)
        rows[count:end] = part
        count = end
    rows.resize(count, refcheck=False)
    return rows


def fingerprint(fragments: Sequence[lance.FragmentMetadata], fields: Sequence[Any]) -> str:
    """Returns a digest of what a version's rows and columns are read from, 32 hex characters.

    Data and deletion files have random names, so equal digests mean the same files. Where they lie (URI,
    base paths of a clone) does not count. Field ids and names count, since renaming a column, or adding
    one without data, changes no file. Types do not: a changed type comes with a new field id.

    Args:
        fragments: The fragments in manifest order.
        fields: The top-level fields of the version's Lance schema.
    """

    def named(field: Any) -> list[Any]:
        return [field.id(), field.name(), [named(child) for child in field.children()]]

    def stored(file: Any) -> list[Any]:
        return [file.path, list(file.fields), list(file.column_indices)]

    def summary(fragment: lance.FragmentMetadata) -> list[Any]:
        gone = fragment.deletion_file
        return [
            fragment.id,
            fragment.physical_rows,
            [stored(file) for file in fragment.files],
            None if gone is None else [gone.read_version, gone.id, gone.num_deleted_rows],
            [[stored(overlay.data_file), overlay.committed_version] for overlay in fragment.overlays],
        ]

    parts = [_FINGERPRINT_FORMAT, [named(f) for f in fields], [summary(f) for f in fragments]]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:32]
