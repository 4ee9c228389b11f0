"""A fall of the reward that is one of cut responses: those that end by themselves are rewarded as before."""

from __future__ import annotations

from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.collapse import TRAILING_VALUES
from foreshock.diagnosis.history import NEWEST_STEPS, History, PastAlert
from foreshock.diagnosis.wording import percent, reward_number

RESPONSES_CUT: Final = "responses_cut"

MANY_CUT: Final = 0.2
"""The fraction of cut responses from which a headline names them."""

_LEAST_STEPS: Final = 5
_LEAST_OF_FALL: Final = 0.5
"""Least part of the fall that responses which were not cut do not share."""


def cut_in_fall(fall: PastAlert, history: History) -> tuple[DiagnosisCause, ...]:
    """Return the cut responses as a cause if most of an open fall of the reward is theirs."""
    cut, finished = history.truncated.newest(), history.finished_reward
    of_newest = [value for step, value in zip(finished.steps, finished.values, strict=True) if step >= _first(history)]
    if "before" not in fall.evidence or not cut >= MANY_CUT or len(of_newest) < _LEAST_STEPS:
        return ()
    before, now = float(fall.evidence["before"]), history.reward.newest(TRAILING_VALUES)
    others = finished.newest()
    if not others - now >= _LEAST_OF_FALL * (before - now) > 0.0:
        return ()
    pairs = zip(history.truncated.steps, history.truncated.values, strict=True)
    earlier = [value for step, value in pairs if step < fall.onset][-NEWEST_STEPS:]
    share = f", {percent(sorted(earlier)[len(earlier) // 2])} before step {fall.onset}" if earlier else ""
    title = f"{percent(cut)} of the responses are cut, the others get {reward_number(others)}"
    sentence = (
        f"{percent(cut)} of the responses are cut at the length cap{share}. The others get a reward of "
        f"{reward_number(others)}; all got {reward_number(before)} before the fall, and get {reward_number(now)} now: "
        "most of the fall is that of cut responses."
    )
    return (
        DiagnosisCause(
            name=RESPONSES_CUT,
            sentence=sentence,
            source="detector",
            title=title,
            explains=False,
            what_to_do="Read some of the cut responses. If they repeat themselves, the policy degenerates and no cap "
            "helps. Else raise the length cap, and leave cut responses out of the update instead of calling them "
            "wrong.",
            evidence={"cut": cut, "reward_of_others": others, "before": before, "now": now},
        ),
    )


def _first(history: History) -> int:
    """Return the first of the newest steps."""
    return min(history.truncated.steps[-NEWEST_STEPS:], default=0)
