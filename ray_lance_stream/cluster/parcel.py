"""A pickled value for the constructors of actors that Ray may restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray import cloudpickle

_INLINE_BYTES: Final = 64 * 1024  # below Ray's limit for arguments that travel in the call itself


@dataclass(frozen=True)
class Parcel:
    """Carried unopened by the actors that only pass it on.

    A restart needs the constructor's arguments again. Small ones are kept in the call; a large one stays in
    the object store for as long as a parcel with its reference is held by its owner.
    """

    data: bytes | None = field(repr=False)  # may hold credentials
    ref: list[Any] = field(repr=False)

    @classmethod
    def of(cls, data: bytes) -> Parcel:
        """Takes a pickled value; the calling process owns a large one."""
        return cls(data, []) if len(data) <= _INLINE_BYTES else cls(None, [ray.put(data)])

    def unpack(self) -> Any:
        """Returns the value."""
        return cloudpickle.loads(ray.get(self.ref[0]) if self.data is None else self.data)
