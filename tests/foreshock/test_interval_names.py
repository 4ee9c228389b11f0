"""Ranges as words: one that is too wide to act on is said to tell nothing, wherever it is shown."""

from __future__ import annotations

import pytest

from foreshock.interval_names import UNTOLD, ends_in_words, range_in_words


@pytest.mark.parametrize(
    ("mean", "low", "high", "words"),
    [(1.2, 0.0, 2639.0, UNTOLD), (2e-4, 0.0, 0.5, UNTOLD), (0.0, 0.0, 1.0, UNTOLD),
     (2e-4, 1e-4, 3e-4, "0.0001 to 0.0003"), (2e-4, 0.0, 2e-2, "0 to 0.02"), (3e-6, 0.0, 5e-4, "0 to 0.0005")],
)  # fmt: skip
def test_a_range_beyond_a_hundred_means_tells_nothing(mean: float, low: float, high: float, words: str) -> None:
    assert ends_in_words(mean, low, high, "{:g}".format) == words


def test_a_range_has_its_name() -> None:
    assert range_in_words(2.0, 1.0, 3.0, "{:g}".format) == "range over the prompts 1 to 3"
    assert range_in_words(2.0, 0.0, 3000.0, "{:g}".format) == "range over the prompts: cannot tell"
