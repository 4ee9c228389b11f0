"""Cut responses and the reward: a fall of it that is theirs, and a reward that pays for being cut."""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.collapse import TRAILING_VALUES
from foreshock.diagnosis.history import NEWEST_STEPS, History, PastAlert
from foreshock.diagnosis.wording import percent, reward_number

RESPONSES_CUT: Final = "responses_cut"

MANY_CUT: Final = 0.2
"""The fraction of cut responses from which a headline names them."""

CUT_REWARDED: Final = "cut_rewarded"

_LEAST_STEPS: Final = 5
_SOME_CUT: Final = 0.05
_LEAST_OF_BOTH: Final = 8
"""Least steps with cut and other responses, at least 5 % of each."""
_LEAST_MORE: Final = 0.1
_Z_OF_CUT: Final = 4.0
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


def cut_rewarded(history: History) -> tuple[DiagnosisCause, ...]:
    """Return as a cause that responses which are cut get clearly more reward than those that end by themselves."""
    finished = dict(zip(history.finished_reward.steps, history.finished_reward.values, strict=True))
    cut = dict(zip(history.truncated.steps, history.truncated.values, strict=True))
    both = [
        (others, (reward - (1.0 - cut[step]) * others) / cut[step])
        for step, reward in zip(history.reward.steps, history.reward.values, strict=True)
        if (others := finished.get(step)) is not None and _SOME_CUT <= cut.get(step, 0.0) <= 1.0 - _SOME_CUT
    ]
    if len(both) < _LEAST_OF_BOTH or not history.truncated.newest() >= MANY_CUT:
        return ()
    more = [of_cut - others for others, of_cut in both]
    of_others, of_cut = fmean(others for others, _ in both), fmean(each for _, each in both)
    if fmean(more) < max(_Z_OF_CUT * math.sqrt(variance(more) / len(more)), _LEAST_MORE * abs(of_others)):
        return ()
    title = f"cut responses get more reward ({reward_number(of_cut)}) than the others ({reward_number(of_others)})"
    return (
        DiagnosisCause(
            name=CUT_REWARDED,
            sentence=f"{title}, over {len(both)} steps with both; {percent(history.truncated.newest())} are cut now. "
            "The reward pays for length, or for what stands before the end.",
            source="detector",
            title=title,
            explains=False,
            what_to_do="Read some of the cut responses and look at the reward function: give no reward to what is cut, "
            "or less for length. A longer cap would feed it.",
            evidence={"of_cut": of_cut, "of_others": of_others, "steps": len(both)},
        ),
    )


def _first(history: History) -> int:
    """Return the first of the newest steps."""
    return min(history.truncated.steps[-NEWEST_STEPS:], default=0)
