"""waits.py: percentiles from buckets, a loop's clock, when a wait is told of."""

from __future__ import annotations

import numpy as np
import pytest

from ray_lance_stream.waits import LoopClock, Patience, WaitHistogram


@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0])
def test_percentiles_are_near_the_true_ones(scale: float) -> None:
    waits = np.random.default_rng(3).lognormal(np.log(scale), 1.0, 5000)
    histogram = WaitHistogram()
    for wait in waits:
        histogram.add(float(wait))
    shares = (0.1, 0.5, 0.9, 0.99)
    assert histogram.percentiles(shares) == pytest.approx(np.quantile(waits, shares), rel=0.17)


def test_percentiles_at_the_edges() -> None:
    histogram = WaitHistogram()
    assert histogram.percentiles((0.5, 0.99)) == [0, 0]
    histogram.add(0.0)
    assert histogram.percentiles((0.5, 0.99)) == [0, 0]
    histogram.add(5000.0)
    assert histogram.percentiles((1.0,)) == [5000.0]


def test_the_clock_counts_waits_and_work() -> None:
    clock = LoopClock()
    clock.asked(10.0, None)
    assert clock.waiting_s(12.0) == 2.0
    clock.handed(13.0)
    assert (clock.wait_s, clock.train_s, clock.waiting_s(14.0)) == (3.0, 0.0, 0.0)
    clock.asked(15.0, 13.0)
    clock.handed(15.5)
    assert (clock.wait_s, clock.train_s) == (3.5, 2.0)
    assert clock.histogram.percentiles((1.0,)) == [3.0]


def test_a_wait_is_told_of_at_growing_intervals() -> None:
    patience = Patience(first_s=5.0, longest_s=60.0)
    told = [second for second in range(300) if patience.is_over(second)]
    assert told == [5, 10, 20, 40, 80, 140, 200, 260]
    assert [second for second in range(11) if patience.is_over(second)] == [5, 10], "another wait begins anew"
