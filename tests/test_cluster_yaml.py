"""The cluster file at the top of the repository is one that Ray accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from ray_lance_stream.config import POOL_LABEL

PATH = Path(__file__).parent.parent / "cluster.yaml"


def load() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(PATH.read_text())
    return content


def test_ray_accepts_it() -> None:
    validate_config(prepare_config(load()))


def test_ray_refuses_a_typing_error_in_it() -> None:
    broken = load()
    broken["available_node_types"]["gpu"]["max_worker"] = 1
    with pytest.raises(Exception, match="max_worker"):
        validate_config(prepare_config(broken))


def test_prefetchers_find_the_pool_that_is_meant_for_them() -> None:
    types = load()["available_node_types"]
    assert [name for name, kind in types.items() if kind.get("labels") == POOL_LABEL] == ["loader"]
    assert types["head"]["resources"]["CPU"] == 0 and "GPU" not in types["loader"]["resources"]
