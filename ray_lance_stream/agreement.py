"""How ranks that may have skipped different rows find the end they have in common.

Every rank says up to which cycle it can serve, looking a few cycles ahead; the least of these is how far all of them
go. No rank hands out a cycle that another one cannot, so none waits in a collective for a rank that has finished.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ray_lance_stream.errors import ConfigError, StreamClosedError, explain

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
            StreamClosedError: ``stop`` was set, where that can be noticed.
        """


class GroupAgreement:
    """An agreement over a ``torch.distributed`` process group, one small all-reduce each time."""

    def __init__(self, group: Any) -> None:
        self._group = None if group == "world" else group

    def least(self, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Agreement``."""
        import torch
        import torch.distributed as dist

        del epoch, cycle, stop
        on_gpu = dist.get_backend(self._group) == "nccl"
        number = torch.tensor([servable], dtype=torch.int64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._group)
        return int(number.item())


class ThreadAgreement:
    """An agreement among replicas that run on threads of one process.

    Args:
        size: Their number.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: dict[tuple[int, int], dict[int, int]] = {}
        self._changed = threading.Condition()

    def member(self, rank: int) -> Agreement:
        """Returns the agreement as one replica sees it."""
        return _Member(self, rank)

    def say(self, rank: int, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """Notes what a replica says, and waits for the others."""
        with self._changed:
            said = self._said.setdefault((epoch, cycle), {})
            said[rank] = servable
            self._changed.notify_all()
            while len(said) < self._size:
                if stop.is_set():
                    raise StreamClosedError("this iteration of the shard has ended")
                self._changed.wait(_POLL_S)
            return min(said.values())


class _Member:
    def __init__(self, whole: ThreadAgreement, rank: int) -> None:
        self._whole = whole
        self._rank = rank

    def least(self, epoch: int, cycle: int, servable: int, stop: threading.Event) -> int:
        """See ``Agreement``."""
        return self._whole.say(self._rank, epoch, cycle, servable, stop)


def agreement_of(coordinator: Any) -> Agreement | None:
    """Returns what a dataset's ``coordinator`` stands for: None, "world", a process group, or an agreement."""
    if coordinator is None or hasattr(coordinator, "least"):
        agreement: Agreement | None = coordinator
        return agreement
    import torch.distributed as dist

    if coordinator == "world" or isinstance(coordinator, dist.ProcessGroup):
        if not dist.is_initialized():
            raise ConfigError(
                explain(
                    "coordinator needs torch.distributed",
                    found="no process group",
                    expected="a process that has called torch.distributed.init_process_group",
                    remedy="call it before, or leave coordinator out",
                )
            )
        return GroupAgreement(coordinator)
    raise ConfigError(
        explain(
            "coordinator is not valid",
            found=f"an object of type {type(coordinator).__name__}",
            expected="a torch.distributed process group, or 'world'",
            remedy="leave it out where no rows are skipped",
        )
    )
