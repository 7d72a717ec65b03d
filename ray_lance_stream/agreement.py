"""How ranks that may have skipped different rows find the end they have in common.

Every rank says up to which cycle it can serve, looking a few cycles ahead; the least of these is how far all of them
go. No rank hands out a cycle that another one cannot, so none waits in a collective for a rank that has finished.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ray_lance_stream.errors import ConfigError, LockstepError, StreamClosedError, explain
from ray_lance_stream.groupagreement import GroupAgreement

_POLL_S = 0.1


class Agreement(Protocol):
    """Finds the least of all ranks' numbers; every rank calls it at the same cycles."""

    def least(self, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """Returns the least of what all ranks say.

        Args:
            epoch: The epoch.
            cycle: Where this rank stands; the same on all of them.
            servable: Up to which cycle it can serve; if that is ``cycle``, its epoch ends here.
            stop: Set when the answer is not wanted any more.

        Raises:
            LockstepError: Another rank will not come.
            StreamClosedError: ``stop`` was set.
        """

    def failed(self, epoch: int, cycle: int, error: BaseException) -> None:
        """Tells the others that this rank cannot say its number, so that they do not wait for it."""

    def close(self) -> None:
        """Called when this rank does not go on."""


class ThreadAgreement:
    """An agreement among replicas that run on threads of one process.

    Args:
        size: Their number.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: dict[tuple[int, int], dict[int, int | BaseException]] = {}
        self._changed = threading.Condition()

    def member(self, rank: int) -> Agreement:
        """Returns the agreement as one replica sees it."""
        return _Member(self, rank)

    def say(self, rank: int, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """Notes what a replica says, and waits for the others.

        Raises:
            LockstepError: One of them has failed.
            StreamClosedError: ``stop`` was set.
        """
        with self._changed:
            said = self._said.setdefault((epoch, cycle), {})
            said[rank] = servable
            self._changed.notify_all()
            while len(said) < self._size:
                if stop.is_set():
                    raise StreamClosedError("this iteration of the shard has ended")
                self._changed.wait(_POLL_S)
            if errors := [error for error in said.values() if isinstance(error, BaseException)]:
                raise LockstepError(f"another replica failed: {errors[0]}")
            return min(number for number in said.values() if isinstance(number, int))

    def fail(self, rank: int, epoch: int, cycle: int, error: BaseException) -> None:
        """Notes that a replica has no number to say."""
        with self._changed:
            self._said.setdefault((epoch, cycle), {})[rank] = error
            self._changed.notify_all()


class _Member:
    def __init__(self, whole: ThreadAgreement, rank: int) -> None:
        self._whole = whole
        self._rank = rank

    def least(self, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Agreement``."""
        return self._whole.say(self._rank, epoch, cycle, servable, stop)

    def failed(self, epoch: int, cycle: int, error: BaseException) -> None:
        """See ``Agreement``."""
        self._whole.fail(self._rank, epoch, cycle, error)

    def close(self) -> None:
        """See ``Agreement``."""


def agreement_of(coordinator: Any, world_size: int) -> Agreement | None:
    """Returns what ``coordinator`` stands for: None, "world", a process group, or an agreement.

    Args:
        coordinator: What the user passed. Any backend will do, NCCL included.
        world_size: Number of replicas that are to agree.

    Raises:
        ConfigError: It is none of these, or the group does not hold this process, or not all replicas.
    """
    if coordinator is None or hasattr(coordinator, "least"):
        agreement: Agreement | None = coordinator
        return agreement
    import torch.distributed as dist

    is_group = dist.is_available() and isinstance(coordinator, dist.ProcessGroup)
    if coordinator != "world" and not is_group:
        raise ConfigError(
            explain(
                "coordinator is not valid",
                found=f"an object of type {type(coordinator).__name__}",
                expected="a torch.distributed process group that this process is in, or 'world'",
                remedy="leave it out where no rows are skipped",
            )
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            explain(
                "coordinator needs torch.distributed",
                found="no process group",
                expected="a process that has called torch.distributed.init_process_group",
                remedy="call it before, or leave coordinator out",
            )
        )
    size = dist.get_world_size(None if coordinator == "world" else coordinator)
    if size < world_size:
        raise ConfigError(
            explain(
                "the coordinator's group does not hold every rank",
                found=f"{size} processes, world_size={world_size}",
                expected="a process for every rank",
                remedy="pass the group of all data-parallel ranks",
            )
        )
    return GroupAgreement(coordinator)
