"""Where prefetchers go, decided from the configuration and the nodes seen. No Ray call in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lance_stream.config import POOL_LABEL, PrefetchConfig

Node = Mapping[str, Any]  # an entry of ray.nodes()
# Bytes of memory: Ray places an actor that asks for nothing at random, whatever the strategy. Only of such a one: types
# of nodes that Ray may start need not say how much memory they have, and would not be started for it.
_NEXT_TO_NOTHING: Final = 1


def actor_options(
    config: PrefetchConfig, nodes: Sequence[Node], indexes: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """Returns Ray's actor options for prefetchers of the pool.

    Args:
        config: What the user asked for.
        nodes: The cluster as ``ray.nodes()`` shows it.
        indexes: Which prefetchers; those that the pool starts with by default.

    Without a selector or resources: nodes labelled ``pool=data`` if there are any, else nodes with CPUs
    and no GPU, else nodes with CPUs, in turn. The affinity is soft, so a prefetcher outlives its node.
    """
    chosen = range(config.min_actors) if indexes is None else list(indexes)
    common: dict[str, Any] = {"num_cpus": config.num_cpus}
    if not config.num_cpus and not config.resources:
        common["memory"] = _NEXT_TO_NOTHING
    if config.resources:
        common["resources"] = dict(config.resources)
    if config.runtime_env is not None:
        common["runtime_env"] = dict(config.runtime_env)
    selector = dict(config.label_selector)
    alive = [node for node in nodes if node.get("Alive")]
    if not selector and not config.resources and any(_has_label(node, POOL_LABEL) for node in alive):
        selector = dict(POOL_LABEL)
    if selector or config.resources:
        if selector:
            common["label_selector"] = selector
        return [common | {"scheduling_strategy": "SPREAD"} for _ in chosen]
    candidates = _first_non_empty(
        [node for node in alive if _amount(node, "CPU") and not _amount(node, "GPU")],
        [node for node in alive if _amount(node, "CPU")],
        alive,
    )
    if not candidates:
        return [dict(common) for _ in chosen]
    return [
        common
        | {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(
                candidates[index % len(candidates)]["NodeID"], soft=True
            )
        }
        for index in chosen
    ]


def extra_options(config: PrefetchConfig, nodes: Sequence[Node]) -> dict[str, Any]:
    """Returns the options of one more prefetcher, for a short time, where those of the pool may have taken all.

    It reserves nothing, and so is placed by where the resources of the pool's are, free or not.
    """
    options = actor_options(config, nodes)[0] | {"num_cpus": 0, "memory": _NEXT_TO_NOTHING}
    resources = options.pop("resources", {})
    able = [n for n in nodes if n.get("Alive") and all(_amount(n, key) >= least for key, least in resources.items())]
    if resources and able and "label_selector" not in options:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(able[0]["NodeID"], soft=True)
    return options


def describe_request(config: PrefetchConfig) -> str:
    """Returns what each prefetcher asks for, for errors."""
    parts = [f"num_cpus={config.num_cpus}"]
    if config.resources:
        parts.append(f"resources={dict(config.resources)}")
    if config.label_selector:
        parts.append(f"label_selector={dict(config.label_selector)}")
    return ", ".join(parts)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Returns the living nodes with their resources and the labels users set, for errors."""
    seen = []
    for node in nodes:
        if node.get("Alive"):
            shown = {k: v for k, v in node["Resources"].items() if ":" not in k and "memory" not in k}
            labels = {k: v for k, v in node.get("Labels", {}).items() if not k.startswith("ray.io/")}
            seen.append(f"{node['NodeID'][:8]} (resources {shown}, labels {labels})")
    return "; ".join(seen) or "no living node"


def _has_label(node: Node, labels: Mapping[str, str]) -> bool:
    have = node.get("Labels") or {}
    return all(have.get(key) == value for key, value in labels.items())


def _amount(node: Node, resource: str) -> float:
    return float((node.get("Resources") or {}).get(resource, 0))


def _first_non_empty(*choices: Sequence[Node]) -> Sequence[Node]:
    return next((choice for choice in choices if choice), [])
