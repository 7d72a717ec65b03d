"""The cluster files are ones that Ray accepts, and describe the same pools."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from ray_lance_stream.config import POOL_LABEL

ROOT = Path(__file__).parent.parent
FACTS = ("min_workers", "max_workers", "resources", "labels")


def load() -> dict[str, Any]:
    """The content of cluster.yaml."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return content


def load_kuberay() -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster and the volume of examples/raycluster.yaml, as Kubernetes stores them."""
    cluster, volume = yaml.safe_load_all((ROOT / "examples" / "raycluster.yaml").read_text())
    cluster["metadata"].setdefault("namespace", "default")
    return cluster, volume


def pools(types: dict[str, Any]) -> dict[str, Any]:
    """What the autoscaler goes by, for each pool; memory aside, which cluster.yaml leaves to the machines."""
    return {
        name: {
            fact: {k: v for k, v in kind[fact].items() if k != "memory"} if fact == "resources" else kind[fact]
            for fact in FACTS
        }
        for name, kind in types.items()
        if kind.get("labels")
    }


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
    # Prefetchers that reserve a CPU fit nowhere else, so that Ray launches this pool for them.
    assert [name for name, kind in types.items() if kind["resources"]["CPU"] > 0] == ["loader"]
    assert "GPU" not in types["loader"]["resources"] and types["loader"]["min_workers"] == 0


def test_every_node_gets_the_package_and_the_token() -> None:
    cluster = load()
    (command,) = cluster["setup_commands"]
    (directory,) = [there for there, here in cluster["file_mounts"].items() if here == "."]
    assert f"pip install -q '{directory}[examples]'" == command
    assert (ROOT / "pyproject.toml").exists() and cluster["rsync_filter"] == [".gitignore"]
    assert cluster["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    assert "--env RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]


def test_ray_reads_the_same_pools_from_the_manifest_for_kuberay() -> None:
    cluster, _ = load_kuberay()
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]  # checks it as well
    assert pools(types) == pools(prepare_config(load())["available_node_types"])
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert cluster["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] == 60 * load()["idle_timeout_minutes"]


def test_the_manifest_for_kuberay_is_whole() -> None:
    cluster, volume = load_kuberay()
    spec = cluster["spec"]
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"  # knows labels
    assert spec["authOptions"] == {"mode": "token"}
    assert f":{spec['rayVersion']}-" in load()["docker"]["image"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"].endswith(f":{version('ray-lance-stream')}")
        assert [mount["name"] for mount in container["volumeMounts"]] == [v["name"] for v in pod["volumes"]]
        assert [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"]] == [volume["metadata"]["name"]]
