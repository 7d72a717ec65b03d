"""The examples, run: what they say they show is so."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

pytestmark = pytest.mark.cluster
EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_CPUS = 3
SHORT = ("images", "tokens", "plain_torch", "moved")


@pytest.fixture
def run_here(tmp_path: Path, one_node: None) -> Any:
    """Runs an example's ``main`` in this process, on the module's Ray."""
    del one_node

    def run(name: str) -> dict[str, Any]:
        module = importlib.import_module(name)
        by_value: Any = ray.cloudpickle.register_pickle_by_value  # untyped
        by_value(module)  # as where it is the script; workers do not find it
        found: dict[str, Any] = module.main(tmp_path)
        return found

    return run


def test_they_are_short() -> None:
    for name in SHORT:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120


def test_a_plain_loop_goes_on_bit_for_bit_without_ray(tmp_path: Path) -> None:
    script = EXAMPLES / "plain_torch.py"
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # 1,797 digits: 12 splits of 149, 18 steps of 8 cycles and one of 5. The break comes after step 7 of epoch 1.
    assert json.loads(done.stdout) == {"steps": [26, 31], "same_rows": True, "rows": 1797, "same_weights": True}
    state = json.loads((tmp_path / "output/plain_torch/stopped/stream.json").read_text())
    assert (state["epoch"], state["samples_consumed_per_split"]) in [(2, 149), (3, 0), (2, [149] * 12), (3, [0] * 12)]


@pytest.mark.fault
def test_images_are_decoded_and_augmented_alike_for_workers_and_one_reader(run_here: Any) -> None:
    found = run_here("images")
    assert found["equal"]
    assert found["delivered"] == 8 * 296  # 2 photographs of 10 by 15 tiles, less what fills no cycle
    assert found["distinct"] > 6 * 296  # another part of a tile in every epoch, mirrored or not
    assert found["accuracy"] > 0.85


@pytest.mark.long
@pytest.mark.slow
def test_token_weighted_gradients_are_those_of_one_process(run_here: Any) -> None:
    found = run_here("tokens")
    assert found["tokens"] == found["tokens_of_workers"] > 10_000
    assert found["padding"] > 0 and found["moved"] > 0.1
    assert found["apart"] < 1e-9


@pytest.mark.slow
def test_a_program_and_a_checkpoint_of_lancedb_go_on_with_the_next_row(run_here: Any) -> None:
    found = run_here("moved")
    assert len(found["whole"]) == len(set(found["whole"])) == 1792 and found["before"] == 400
    assert found["by_the_program"] == found["whole"]
    assert found["by_ray_train"] == found["whole"]
