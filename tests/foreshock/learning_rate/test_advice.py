"""Advice: order of answers, tolerance of other releases, evaluation at any step, and what was applied of it."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.api.records import parse
from foreshock.learning_rate import Advice, AdviceAlert
from foreshock.learning_rate.advice import Applied, effect_in_words
from foreshock.learning_rate.length_decay import Point, Schedule

SURGE_POINT: dict[str, Any] = {"step": 115, "boundary": 198, "period": 198}
ANSWER: dict[str, Any] = {
    "run": "run-1",
    "attempt": 1,
    "revision": 7,
    "scale": 0.5,
    "schedule": {"surge_step": 110, "decay_period": 198, "factor": 0.5, "floor": 0.1, "new": 1},
    "points": [SURGE_POINT | {"new": 1}],
    "phase": "decaying",
    "mode": "apply",
    "next_decay_step": 396,
    "observed_step": 201,
    "stale": False,
    "reason": "Response lengths surged at step 110.",
    "alerts": [{"rule": "length_surge", "step": 110, "severity": "warning", "why": "w", "what_to_do": "d", "new": 1}],
    "want_weights_at_step": 210,
}


def test_each_point_holds_from_its_step_on() -> None:
    halved = [{"step": 150, "halvings": 1, "boundary": 198, "period": 198}, {"step": 300, "halvings": 3}]
    advice = Advice.from_json({**ANSWER, "points": [halved[1], SURGE_POINT, halved[0]]})
    assert [advice.scale(step) for step in (149, 150, 198, 299, 300, 9_999)] == [1.0, 0.5, 0.25, 0.25, 0.125, 0.125]


@given(
    points=st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 1.0), st.floats(0.0, 0.25)), min_size=1, max_size=6)
)
def test_loop_of_an_old_answer_falls_for_ten_steps_and_stays(points: list[tuple[int, float, float]]) -> None:
    sent = [{"step": step, "loop": loop, "loop_step": step, "fall": fall} for step, loop, fall in sorted(points)]
    last, advice = sent[-1], Advice.from_json({**ANSWER, "points": sent})
    scales = [advice.scale(step) for step in range(int(last["step"]), int(last["step"]) + 100)]
    assert scales == sorted(scales, reverse=True)
    assert scales[0] == max(last["loop"], 0.1)
    assert scales[10:] == [max(last["loop"] * math.exp(-10 * last["fall"]), 0.1)] * 90


@pytest.mark.parametrize("mode", ["shadow", "something new"])
def test_shadow_and_unknown_modes_scale_by_one(mode: str) -> None:
    advice = Advice.from_json({**ANSWER, "mode": mode})
    assert (advice.scale(400), advice.advised_scale(400)) == (1.0, 0.25)


@given(
    surge=st.integers(1, 500), period=st.integers(1, 500), halvings=st.integers(0, 5),
    mode=st.sampled_from(["apply", "shadow"]), step=st.integers(0, 3000),
)  # fmt: skip
def test_json_round_trip_keeps_every_field(surge: int, period: int, halvings: int, mode: str, step: int) -> None:
    advice = Advice(
        run="run-1",
        attempt=2,
        revision=9,
        mode=mode,
        schedule=Schedule(surge, period),
        points=(Point(surge, halvings, surge + period, period), Point(surge + 9, halvings + 1, loop=0.5, loop_step=3)),
        alerts=(AdviceAlert("rule", 3, "critical", "why", "what"),),
        want_weights_at_step=5,
    )
    again = Advice.from_json(json.loads(json.dumps(advice.to_json())))
    assert again == advice
    assert 0.1 <= again.scale(step + 1) <= again.scale(step) <= 1.0


INVALID: list[dict[str, Any]] = [
    {"attempt": None},
    {"revision": "x"},
    {"schedule": {"surge_step": 1}},
    {"schedule": {**ANSWER["schedule"], "factor": 2.0}},
    {"alerts": 3},
    {"points": [{"step": 5, "loop": 0.5, "boundary": 7.5}]},
    # A scale that would rise by itself.
    *(
        {"points": [{"step": 5, "loop": 0.5, **point}]}
        for point in ({"loop": 1.5}, {"loop": 0.0}, {"loop": math.nan}, {"fall": -0.1}, {"period": 0}, {"halvings": -1})
    ),
]


@pytest.mark.parametrize("change", INVALID)
def test_invalid_answer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Advice.from_json({**ANSWER, **change})


APPLIED = Applied(step=201, learning_rate=5e-7, revision=3, scale=0.5)
NEWER = "revision 4 is not acknowledged yet"
RATE_ONLY = Applied(step=201, learning_rate=5e-7, revision=3)


@pytest.mark.parametrize(
    ("mode", "revision", "applied", "words"),
    [
        ("shadow", 3, None, "shown only, the trainer gets 1.0"),
        ("apply", 3, None, "not acknowledged yet"),
        ("apply", 3, APPLIED, "applied 0.5 at step 201 (learning rate 5e-7)"),
        ("apply", 3, RATE_ONLY, "applied the learning rate 5e-7 at step 201"),
        ("apply", 4, APPLIED, f"applied 0.5 at step 201 (learning rate 5e-7) of revision 3; {NEWER}"),
    ],
)
def test_effect_is_what_was_acknowledged(mode: str, revision: int, applied: Applied | None, words: str) -> None:
    assert effect_in_words(mode, revision, applied) == words


def test_a_rate_without_a_scale_is_parsed() -> None:
    answer = {"step": 201, "learning_rate": 5e-7, "revision": 3, "scale": None, "received_at_us": 1}
    assert parse(Applied, answer) == RATE_ONLY
