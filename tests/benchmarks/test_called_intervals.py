"""The benchmark of what is called a 95 % interval: its bar fails when such intervals miss."""

from __future__ import annotations

import pytest

from benchmarks.called_intervals import BATCHES, Called


@pytest.mark.parametrize(
    ("called", "covering", "reached"),
    [(0, 0, True), (19, 0, True), (200, 184, True), (200, 172, True), (200, 171, False), (20, 15, False)],
)
def test_bar_is_90_percent_of_the_called_within_two_errors(called: int, covering: int, reached: bool) -> None:
    assert Called("step", "cell", BATCHES, covering, called, covering).reached is reached
