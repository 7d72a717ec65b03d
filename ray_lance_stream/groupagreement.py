"""The agreement among the processes of a ``torch.distributed`` group: by notes in the store where they met.

Not by collectives. Those of the trainer run at the same time on another thread, and two ranks that begin them in
different orders wait for each other. One that was begun can neither be withdrawn, when a loop is left, nor asked
again. A note is found under the place it speaks of, whenever and however often it is looked for.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from ray_lance_stream.errors import ConfigError, LanceStreamError, LockstepError, StreamClosedError, explain
from ray_lance_stream.gone import when_gone

logger = logging.getLogger("ray_lance_stream")
_FIRST_PAUSE_S: Final = 0.0005  # between two looks for a note; doubles: ranks in step are a moment apart
_LONGEST_PAUSE_S: Final = 0.05
_LOOK_EVERY_S: Final = 0.5  # how often a wait looks whether those it waits for are still there
_SAY_EVERY_S: Final = 30.0  # how often a wait that goes on is told of
_BEAT_S = 2.0  # how often a process shows that it is there
_LOST_AFTER_S = 30.0  # so long without a sign, and a process is lost; more than a pause of a busy machine
_LINGER_S: Final = 5.0  # rank 0 may hold the store: it goes on, and perhaps ends, when the others have read
_RESULTS_KEPT: Final = 1024  # a loop that is left and begun anew asks again, as far back as batches were made ahead
_ENDED: Final = b"ended"
_FAILED: Final = b"failed "


class GroupAgreement:
    """An agreement among all processes of a group; several may belong to one replica.

    Every process makes the agreements of a group in the same order. A process that ends, dies or fails is noticed
    by those that wait for it; a living one is waited for as long as the process group's own timeout says.

    Args:
        group: The process group, or "world".

    Raises:
        ConfigError: This process is not in an initialised group, or has no store.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._rank = dist.get_rank()
        self._ranks: list[int] = dist.get_process_group_ranks(None if group == "world" else group)
        members = hashlib.blake2b(repr(self._ranks).encode(), digest_size=8).hexdigest()
        number = _store_of(members).add(f"made/{self._rank}", 1)
        self._name = f"{members}/{number}"
        self._found: dict[tuple[int, int], int] = {}  # by place: what was agreed
        self._last_key: str | None = None  # of the place agreed last
        self._presence = _Presence(self._name, self._rank)
        when_gone(self, self._presence.end)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("an agreement belongs to the process that is a member of the group")

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._ranks)

    def close(self) -> None:
        """Tells the others that this process will not go on. Safe to repeat."""
        self._presence.end()

    def failed(self, epoch: int, cycle: int, error: BaseException) -> None:
        """Tells those who wait for this process at a place why it does not come."""
        with contextlib.suppress(LanceStreamError), self._store() as store:
            text = f"{type(error).__name__}: {error}"
            store.set(f"{epoch}/{cycle}/{self._rank}", _FAILED + text.encode())

    def least(self, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Agreement``.

        Raises:
            LockstepError: A process that is waited for has failed, ended or died, or does not come.
            StreamClosedError: ``stop`` was set.
        """
        place = (epoch, cycle)
        if place in self._found:
            return self._found[place]
        key = f"{epoch}/{cycle}"
        with self._store() as store:
            store.set(f"{key}/{self._rank}", str(servable))
            self._await_all(store, place, key, stop)
            notes = {rank: store.get(f"{key}/{rank}") for rank in self._ranks}
            self._check(notes, place)
            result = self._found[place] = min(map(int, notes.values()))
            if len(self._found) > _RESULTS_KEPT:
                del self._found[next(iter(self._found))]
            self._tidy(store, key)
            self._leave(store, key, stop)
        return result

    def _await_all(self, store: Any, place: tuple[int, int], key: str, stop: threading.Event) -> None:
        missing = [rank for rank in self._ranks if rank != self._rank]
        watch: _Watch | None = None
        pause_s = _FIRST_PAUSE_S
        while missing:
            if store.check([f"{key}/{missing[0]}"]):
                missing.pop(0)
                continue
            if stop.is_set():
                raise StreamClosedError("this iteration of the shard has ended")
            watch = watch or _Watch(store, place)
            watch.look(missing, key)
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check(self, notes: dict[int, bytes], place: tuple[int, int]) -> None:
        for rank, note in notes.items():
            if note.startswith(_FAILED):
                raise _apart(rank, place, f"it failed with {note[len(_FAILED) :].decode()}")

    def _tidy(self, store: Any, key: str) -> None:
        """Removes what nobody will look for: all have agreed on the place before, or they would not be here."""
        last, self._last_key = self._last_key, key
        if last is not None and last != key:
            store.delete_key(f"{last}/{self._rank}")
            if self._rank == self._ranks[0]:
                store.delete_key(f"{last}/read")

    def _leave(self, store: Any, key: str, stop: threading.Event) -> None:
        if self._rank != self._ranks[0]:
            store.add(f"{key}/read", 1)
            return
        deadline, pause_s = time.monotonic() + _LINGER_S, _FIRST_PAUSE_S
        while store.add(f"{key}/read", 0) < self.size - 1 and time.monotonic() < deadline and not stop.is_set():
            stop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        try:
            yield _store_of(self._name)
        except LanceStreamError:
            raise
        except RuntimeError as error:  # torch's errors of stores
            raise LockstepError(
                explain(
                    "the store of the process group does not answer: the ranks cannot agree on how far they go",
                    found=str(error).strip().split("\n")[0],
                    expected="the process that holds it, most often rank 0, to live as long as the others",
                    remedy="look why it ended; start all ranks again from the last checkpoint",
                )
            ) from error


class _Presence:
    """Shows that this process is there, on a thread of its own, until it is ended."""

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._key = name, f"alive/{rank}"
        self._ended = threading.Event()
        self._lock = threading.Lock()  # no sign of life after the end
        self._beat(0)
        atexit.register(self.end)  # a process that just ends has not died
        threading.Thread(target=self._work, name="lance-stream-alive", daemon=True).start()

    def end(self) -> None:
        """Ends it, and says so."""
        atexit.unregister(self.end)
        with contextlib.suppress(LanceStreamError, RuntimeError), self._lock:
            if not self._ended.is_set():
                self._ended.set()
                _store_of(self._name).set(self._key, _ENDED)

    def _beat(self, number: int) -> None:
        with self._lock:
            if not self._ended.is_set():
                _store_of(self._name).set(self._key, str(number))

    def _work(self) -> None:
        number = 0
        while not self._ended.wait(_BEAT_S):
            number += 1
            try:
                self._beat(number)
            except (LanceStreamError, RuntimeError) as error:  # the group or its store has ended
                logger.debug("cannot show the other ranks that this one is there: %s", error)
                return


class _Watch:
    """Looks, while a wait goes on, whether those that are waited for are still there."""

    def __init__(self, store: Any, place: tuple[int, int]) -> None:
        self._store = store
        self._place = place
        self._began = self._looked = time.monotonic()
        self._said = 0
        self._signs: dict[int, tuple[bytes, float]] = {}  # by rank: the last sign, and when it was new

    def look(self, missing: list[int], key: str) -> None:
        """Raises LockstepError if a process will not come, or has not come for too long."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        for rank in missing:
            self._look_at(rank, key, now)
        waited_s, most_s = now - self._began, self._store.timeout.total_seconds()
        if waited_s > most_s:
            raise _apart(missing[0], self._place, f"it lives, but has not come there within {most_s:.0f} s")
        if waited_s >= (self._said + 1) * _SAY_EVERY_S:
            self._said += 1
            logger.warning("waited %.0f s for ranks %s at epoch %d, cycle %d", waited_s, missing, *self._place)

    def _look_at(self, rank: int, key: str, now: float) -> None:
        if not self._store.check([f"alive/{rank}"]):
            return  # it has not begun
        sign = self._store.get(f"alive/{rank}")
        if sign == _ENDED:
            if self._store.check([f"{key}/{rank}"]):
                return  # it came before it ended
            raise _apart(rank, self._place, "it has ended, or left its loop and closed the stream")
        last, since = self._signs.get(rank, (b"", now))
        if sign != last:
            self._signs[rank] = (sign, now)
        elif now - since > _LOST_AFTER_S:
            raise _apart(rank, self._place, f"it has given no sign of life for {now - since:.0f} s")


def _apart(rank: int, place: tuple[int, int], found: str) -> LockstepError:
    epoch, cycle = place
    return LockstepError(
        explain(
            f"rank {rank} is missing at epoch {epoch}, cycle {cycle}: the ranks cannot agree on how far they go",
            found=found,
            expected="every rank to read the same epochs, step by step",
            remedy=f"look at rank {rank}'s own error; start all ranks again from the last checkpoint",
        )
    )


def _store_of(name: str) -> Any:
    """Returns the part of the default group's store that belongs to an agreement.

    Looked up at every use: who holds a store keeps the port of a group that was destroyed.
    """
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_default_store()
    except ValueError:
        raise ConfigError(
            explain(
                "the process group has been destroyed",
                found="torch.distributed is not initialised",
                expected="a process group that lives as long as the stream is iterated",
                remedy="call torch.distributed.destroy_process_group after the last batch",
            )
        ) from None
    return distributed_c10d.PrefixStore(f"lance_stream/{name}", store)
