"""A fall of the reward with which the answers of tools changed their length: the environment, not the policy."""

from __future__ import annotations

from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, History, PastAlert
from foreshock.diagnosis.wording import number

TOOLS_CHANGED: Final = "tool_answers_changed"

_LEAST_BEFORE: Final = 5
_LEAST_SINCE: Final = 3
_LEAST_TIMES: Final = 2.0
"""Least factor between the lengths before and since the fall; those before vary by less among themselves."""


def tools_in_fall(fall: PastAlert, history: History) -> tuple[DiagnosisCause, ...]:
    """Return the answers of tools as a cause if their length changed at once with an open fall of the reward."""
    values = list(zip(history.tool_tokens.steps, history.tool_tokens.values, strict=True))
    before = [value for step, value in values if step < fall.onset][-NEWEST_STEPS:]
    since = [value for step, value in values if step > fall.onset][:NEWEST_STEPS]
    if len(before) < _LEAST_BEFORE or len(since) < _LEAST_SINCE or median(before) < 1.0:
        return ()
    was, now = median(before), median(since)
    # Each step since is outside the range of those before, which is narrow: what drifts with the policy is not.
    shorter, longer = max(since) * _LEAST_TIMES <= min(before), min(since) >= _LEAST_TIMES * max(before)
    if not (shorter or longer) or max(before) > _LEAST_TIMES * max(min(before), 1e-9):
        return ()
    title = f"the tools answer {number(now)} tokens a rollout, {number(was)} before"
    return (
        DiagnosisCause(
            name=TOOLS_CHANGED,
            sentence=f"{title} step {fall.onset}, where the reward fell: masked tokens that the model did not sample.",
            source="detector",
            title=title,
            explains=False,
            what_to_do=f"Look at the tools and the environment at step {fall.onset}: an answer that is empty or an "
            "error lowers the reward of any policy.",
            evidence={"before": was, "now": now},
        ),
    )
