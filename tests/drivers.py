"""A driver that is a process of its own, on a cluster that outlives it: ``python drivers.py '{"address": ...}'``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def start(**options: Any) -> subprocess.Popen[bytes]:
    """Starts a driver; see :func:`main` for its options."""
    return subprocess.Popen([sys.executable, __file__, json.dumps(options)])


def main(options: dict[str, Any]) -> None:
    """Fits a run that goes on until it is told.

    Args:
        options: address: of the cluster. uri: of the database. storage, name: of the run. resume_from: a
            checkpoint's path. idle_timeout_s: of the stream.
    """
    import ray
    from loops import until_told
    from runs import fit

    from ray_lance_stream import LanceStream, PrefetchConfig

    ray.init(address=options["address"], log_to_driver=False)
    prefetch = PrefetchConfig(num_actors=1, placement_timeout_s=120, idle_timeout_s=options["idle_timeout_s"])
    stream = LanceStream(
        options["uri"],
        "t",
        num_splits=4,
        global_batch_size=8,
        shuffle_seed=7,
        prefetch=prefetch,
        resume_from=options.get("resume_from"),
    )
    scaling = {"use_gpu": True, "resources_per_worker": {"GPU": 1}}
    storage, name = Path(options["storage"]), options["name"]
    fit(until_told, {"train": stream}, 2, storage, name=name, scaling=scaling, step_s=0.1, report_every=4)
    stream.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
