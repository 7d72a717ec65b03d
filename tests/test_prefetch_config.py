"""PrefetchConfig: how many prefetchers, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ray_lance_stream import ConfigError, PrefetchConfig


@pytest.mark.parametrize(("given", "bounds"), [(1, (1, 1)), (5, (5, 5)), ((1, 1), (1, 1)), ((2, 16), (2, 16))])
def test_a_number_or_bounds(given: Any, bounds: tuple[int, int]) -> None:
    config = PrefetchConfig(num_actors=given)
    assert (config.min_actors, config.max_actors) == bounds
    assert config.num_actors == given and f"num_actors={given!r}" in repr(config)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "wrong", [(0, 4), (4, 2), (1,), (1, 2, 3), (), (True, 2), (1, True), (1.0, 2), ("1", 2), (1, None)]
)
def test_bounds_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError) as error:
        PrefetchConfig(num_actors=wrong)
    text = str(error.value)
    assert "num_actors" in text and f"Found: {wrong!r}" in text and "1 <= min <= max" in text and "Remedy: " in text


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None, [1, 2]])
def test_numbers_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_actors.*Remedy: .*\(min, max\)"):
        PrefetchConfig(num_actors=wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, True, "30", float("nan"), float("inf")])
def test_times_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="shrink_after_s"):
        PrefetchConfig(shrink_after_s=wrong)
