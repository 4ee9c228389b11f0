"""A lag that grows is told with its step; one that is large or random from the start is not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, SteppedValues
from foreshock.diagnosis.lags import StepLags


def of_lags(lags: Sequence[int], first: Sequence[int] = (), start: int = 0) -> History:
    """Return a healthy run with these lags, whose k3 is 3e-4 and 1e-4 for each version."""

    def stepped(at: Sequence[int], values: Sequence[int]) -> SteppedValues:
        return SteppedValues(at, [3e-4 + 1e-4 * lag for lag in values])

    steps = range(start, start + len(lags))
    return History(
        observed_step=steps[-1],
        newest_step=steps[-1],
        k3=stepped(steps, lags),
        tokens=[5000] * len(lags),
        lags=[StepLags(str(lag), {}, {}) for lag in lags],
        first_k3=stepped(range(len(first)), first),
        first_lags=[StepLags(str(lag), {}, {}) for lag in first],
        reward=SteppedValues(steps, [0.5] * len(lags)),
        model_kind="moe",
    )


def test_a_lag_that_grows_is_told_with_its_step() -> None:
    history = of_lags([1] * 30 + [2, 3, 4, 5] + [8] * 30)
    found = diagnose(replace(history, k3=SteppedValues(history.k3.steps, [4e-4] * 64)))
    assert "but the lag has grown from about 1 to 8 versions since step 30" in found.headline
    assert found.next_steps[0].startswith("Find what slowed the engines or filled the queue at step 30")


def test_a_mismatch_that_grew_with_the_lag_may_have_another_cause() -> None:
    found = diagnose(of_lags([1] * 30 + [2, 3, 4, 5] + [8] * 30))
    (cause,) = (each for each in found.causes if each.name == "lag_grows")
    assert (cause.certainty, cause.explains) == ("possible", True)
    assert cause.title == "the lag, which has grown from about 1 to 8 versions since step 30"
    assert "and k3 of all tokens with it, from 4.0e-4 to 1.1e-3" in cause.sentence


def test_the_lag_is_that_of_the_tokens_where_it_is_known() -> None:
    history = of_lags([1] * 30 + [8] * 30)
    early, late = {"1": 50.0}, {"5-8": 30.0, "9-16": 10.0}
    of_tokens = [StepLags("mixed", tokens, dict.fromkeys(tokens, 1e-3)) for tokens in (early,) * 30 + (late,) * 30]
    (cause,) = (each for each in diagnose(replace(history, lags=of_tokens)).causes if each.name == "lag_grows")
    assert cause.title.startswith("the lag, which has grown from about 1 to 8 versions since step 30")


def test_a_lag_that_grew_in_steps_that_are_not_known_is_told_as_before_them() -> None:
    (cause,) = diagnose(of_lags([9] * 40, [1] * 16, start=100)).causes
    assert cause.title.startswith("the lag, which has grown from about 1 to 9 versions since before step 100")


@pytest.mark.parametrize(
    "lags",
    [
        [0] * 60,
        [0, 1, 2, 3] + [4] * 60,
        [1] * 55 + [8] * 5,
        [1] * 30 + [2] * 30,
        [random.Random(7).randint(0, 8) for _ in range(60)],
        [1] * 20 + [8] * 20 + [1] * 20,
    ],
)
def test_other_lags_are_not_told(lags: Sequence[int]) -> None:
    assert "lag_grows" not in [each.name for each in diagnose(of_lags(lags)).causes]
