"""A part of the tokens that is far older than the rest, and lags that are one spread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, SteppedValues
from foreshock.diagnosis.lags import StepLags
from tests.foreshock.diagnosis.test_diagnose import HEALTHY

_STEPS = range(1, 31)


def lagging(tokens: dict[str, float], k3: dict[str, float], since: int = 1) -> History:
    """Return a run whose tokens are at these lags from a step on, and all at the youngest one before."""
    young = next(iter(tokens))
    lags = [StepLags("1", tokens, k3) if step >= since else StepLags("1", {young: 5000.0}, k3) for step in _STEPS]
    mean = [sum(each.tokens[lag] * k3[lag] for lag in each.tokens) / sum(each.tokens.values()) for each in lags]
    return replace(
        HEALTHY, k3=SteppedValues(_STEPS, mean), tokens=[5000] * 30, k3_of_others=(), lags=lags, observed_step=30,
        newest_step=30,
    )  # fmt: skip


def test_an_old_part_is_told_with_its_share_and_since_when_and_the_others_are_judged() -> None:
    found = diagnose(lagging({"1": 4300.0, "17+": 700.0}, {"1": 3e-4, "17+": 0.04}, since=12))
    assert found.headline.startswith("Warning since step 12: 14 % of the tokens, at lags 17 and more, have 96 % of all")
    assert found.next_steps[0].startswith("Bound the staleness")


@pytest.mark.parametrize(
    ("tokens", "k3"),
    [
        ({"1": 4300.0, "17+": 700.0}, {"1": 3e-4, "17+": 1e-3}),
        ({"1": 2000.0, "17+": 3000.0}, {"1": 3e-4, "17+": 0.04}),
        ({"1": 4300.0, "17+": 700.0}, {"1": 3e-3, "17+": 0.2}),
        (
            {"0": 556.0, "1": 556.0, "2": 556.0, "3": 556.0, "4": 556.0, "5-8": 2220.0},
            {"0": 3e-4, "1": 4e-4, "2": 7e-4, "3": 1.2e-3, "4": 1.9e-3, "5-8": 7e-3},
        ),
    ],
    ids=["healthy too", "most tokens", "others unhealthy", "one spread"],
)
def test_other_lags_are_not_told_as_a_part(tokens: dict[str, float], k3: dict[str, float]) -> None:
    assert "stale_part" not in [each.name for each in diagnose(lagging(tokens, k3)).causes]
