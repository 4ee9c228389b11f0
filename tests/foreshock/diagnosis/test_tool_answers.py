"""A fall of the reward with the answers of tools, and falls with which they have nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import SteppedValues
from tests.foreshock.diagnosis.test_cut_responses import fallen

_STEPS = range(67, 131)


def tool_tokens(before: Sequence[float], since: Sequence[float]) -> SteppedValues:
    """Return masked tokens a rollout around step 76, where the reward falls."""
    return SteppedValues(_STEPS, [(before if step < 76 else since)[step % len(before)] for step in _STEPS])


def test_a_fall_with_the_answers_of_tools_names_the_environment() -> None:
    found = diagnose(replace(fallen(0.2), tool_tokens=tool_tokens([10.5, 11.5], [1.0, 1.1])))
    assert "; the tools answer 1.1 tokens a rollout, 12 before" in found.headline
    assert found.next_steps[0].endswith(
        "Look at the tools and the environment at step 76: an answer that is empty or an error lowers the reward of "
        "any policy."
    )


@pytest.mark.parametrize(
    ("before", "since"),
    [([0.0, 0.0], [0.0, 0.0]), ([10.5, 11.5], [8.0, 12.0]), ([4.0, 20.0], [1.0, 1.0]), ([0.2, 0.4], [3.0, 4.0])],
)
def test_answers_that_are_as_before_or_vary_by_themselves_are_not_told(
    before: Sequence[float], since: Sequence[float]
) -> None:
    found = diagnose(replace(fallen(0.2), tool_tokens=tool_tokens(before, since)))
    assert "tool_answers_changed" not in [each.name for each in found.causes]
