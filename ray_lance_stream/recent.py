"""A cache of the last few values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The last few values made, each made once even if several threads ask at the same time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:  # type: ignore[override]
        """Returns the value of a key, made if it is not there."""
        with self._lock:
            if key not in self:
                self[key] = make()
                while len(self) > self._size:
                    self.popitem(last=False)
            self.move_to_end(key)
            return self[key]

    def forget(self) -> None:
        """Drops all values: they are made anew when they are asked for."""
        with self._lock:
            self.clear()
