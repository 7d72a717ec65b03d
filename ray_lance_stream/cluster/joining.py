"""Joins a running cluster for a look at it; never starts one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Final

import ray

from ray_lance_stream.errors import PlacementError, explain

_KNOCK_S: Final = 5.0


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Connects this process to a cluster for a while, or uses the connection it has.

    Args:
        address: The cluster; by default the one that RAY_ADDRESS names or that runs on this machine.

    Raises:
        PlacementError: There is no such cluster, or it does not answer.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        _knock(address)
        # "auto" refuses to start a cluster, as None would.
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise PlacementError(
            explain(
                "no Ray cluster could be joined",
                found=f"{address or 'none'}: {str(error).strip().splitlines()[0]}",
                expected="a running cluster of the same Ray and Python versions",
                remedy="run this on a node of the cluster, or pass --address HOST:PORT, as `ray start` printed it",
            )
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_address() -> str:
    """Where the cluster is to which this process is connected."""
    return str(ray.get_runtime_context().gcs_address)


def _knock(address: str | None) -> None:
    """Raises OSError where nobody listens: Ray itself would try for more than a minute."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
