"""How ranks that may have skipped different rows find the end they have in common.

Every rank says up to which cycle it can serve, looking a few cycles ahead; the least of these is how far all of them
go. No rank hands out a cycle that another one cannot, so none waits in a collective for a rank that has finished.
"""

from __future__ import annotations

from typing import Any, Protocol

from ray_lance_stream.errors import ConfigError, explain


class Agreement(Protocol):
    """Finds the least of all ranks' numbers; every rank calls it at the same cycles."""

    def least(self, epoch: int, cycle: int, servable: int) -> int:
        """Returns the least of what all ranks say.

        Args:
            epoch: The epoch.
            cycle: Where this rank stands; the same on all of them.
            servable: Up to which cycle it can serve; if that is ``cycle``, its epoch ends here.
        """


class GroupAgreement:
    """An agreement over a ``torch.distributed`` process group, one small all-reduce each time."""

    def __init__(self, group: Any) -> None:
        self._group = None if group == "world" else group

    def least(self, epoch: int, cycle: int, servable: int) -> int:
        """See ``Agreement``."""
        import torch
        import torch.distributed as dist

        del epoch, cycle
        on_gpu = dist.get_backend(self._group) == "nccl"
        number = torch.tensor([servable], dtype=torch.int64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._group)
        return int(number.item())


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
