"""Tests of the suggestions for misspelled names."""

from __future__ import annotations

import pytest

from foreshock.suggestions import did_you_mean


@pytest.mark.parametrize(
    ("given", "expected"),
    [("stpe", "step"), ("STEP", "step"), ("comparision", "comparison"), ("trainer/rollot", "trainer/rollout")],
)
def test_most_similar_name_is_suggested(given: str, expected: str) -> None:
    known = ["step", "steps_total", "comparison", "trainer/rollout"]
    assert did_you_mean(given, known) == f", did you mean {expected!r}?"


def test_nothing_is_suggested_for_an_unlike_name() -> None:
    assert did_you_mean("zzz", ["step", "comparison"]) == did_you_mean("step", []) == ""
