"""What lowered the learning rate, in words."""

from __future__ import annotations

import pytest

from foreshock.learning_rate.decisions import AdviceState
from foreshock.learning_rate.length_decay import Point
from foreshock_service.present.pages.presenters.advice import lowered_in_words

SURGE = Point(115, boundary=198, period=198)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (AdviceState(), None),
        (AdviceState(points=(SURGE,)), "lowered by the schedule at step 198"),
        (AdviceState(points=(SURGE, Point(250, 2, 396, 198))), "lowered by an operator at step 250"),
        (AdviceState(points=(Point(260, loop=0.7, loop_step=260),)), "lowered by the control loop at step 260"),
    ],
)
def test_the_newest_fall_of_the_scale_is_told_with_who_made_it(state: AdviceState, said: str | None) -> None:
    assert lowered_in_words(state, 300) == said
