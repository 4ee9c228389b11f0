"""Evaluation rewards that tell another story than the training reward.

A lasting fall, which a training reward that rises does not show (reward hacking), is judged by the detector of the
reward: a fall of a quarter, beyond the noise, that is not recovered. One that stays near 0 while the training reward
rises may not measure what is trained.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.reward import RewardSettings, RewardState, advance_reward
from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.wording import number, reward_number

EVALUATION_FALL: Final = "evaluation_fall"

_FIRST: Final = frozenset({"val", "validation", "eval", "evaluation", "test"})
_REWARD: Final = ("reward", "acc", "score", "pass", "success", "solve", "correct")
_OTHER: Final = frozenset(
    {"std", "var", "min", "max", "len", "length", "lengths", "loss", "time", "count", "num", "number", "zero", "worst"}
)
_SETTINGS: Final = RewardSettings()

EVALUATION_STAYS: Final = "evaluation_stays"
_LEAST_EVALUATIONS: Final = 5
_NEAR_ZERO: Final = 0.05
_RISEN: Final = 0.15
"""A training reward from 0 to 1 has risen by at least this."""


# Cached: it is asked for each scalar of each step.
@lru_cache(maxsize=4096)
def is_evaluation(name: str) -> bool:
    """Return whether a scalar is the mean reward or accuracy of an evaluation: `val-core/gsm8k/acc/mean@8`."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if words[0] not in _FIRST or not _OTHER.isdisjoint(words):
        return False
    return any(each.startswith(_REWARD) for each in words[1:]) or re.search(r"(avg|mean)@\d", name) is not None


def fall_of_evaluation(evaluations: Mapping[str, SteppedValues]) -> tuple[DiagnosisCause, ...]:
    """Return the surest of the falls that last, as a cause; the other evaluations that fell are named with it."""
    falls = {name: _open_fall(tuple(each.steps), tuple(each.values)) for name, each in evaluations.items()}
    known = [(float(each.evidence["deviations"]), name, each) for name, each in falls.items() if each is not None]
    if not known:
        return ()
    deviations, name, fall = max(known, key=lambda each: each[:2])
    before, onset = float(fall.evidence["before"]), int(fall.evidence["onset_step"])
    now = evaluations[name].newest(3)
    title = f"{name} fell from {reward_number(before)} to {reward_number(now)} since step {onset}"
    others = f", and with it {', '.join(sorted(each[1] for each in known if each[1] != name))}"
    sentence = (
        f"{title}, by {number(deviations)} standard deviations{others if len(known) > 1 else ''}; "
        f"{len(known)} of {len(evaluations)} evaluation rewards fell."
    )
    return (
        DiagnosisCause(
            name=EVALUATION_FALL,
            sentence=sentence,
            source="detector",
            title=title,
            explains=False,
            what_to_do=f"Compare {name} with the training reward. If that has not fallen, the policy learns what only "
            "the training rewards: read responses of both, and compare their reward functions and prompts. Go back to "
            f"a checkpoint from before step {onset}.",
            evidence={"first_step": onset, "before": before, "now": now, "deviations": deviations},
        ),
    )


def stays_at_zero(evaluations: Mapping[str, SteppedValues], reward: SteppedValues) -> tuple[DiagnosisCause, ...]:
    """Return the lowest evaluation that stays near 0 as a cause, if the training reward, from 0 to 1, has risen."""
    values, third = reward.values, len(reward.values) // 3
    if third < _LEAST_EVALUATIONS or min(values) < 0.0 or max(values) > 1.0:
        return ()
    before, now = median(values[:third]), median(values[-third:])
    low = [
        (max(each.values), name)
        for name, each in evaluations.items()
        if len(each.values) >= _LEAST_EVALUATIONS and min(each.values) >= 0.0 and max(each.values) <= _NEAR_ZERO
    ]
    if not low or now - before < _RISEN:
        return ()
    _, name = min(low)
    count = len(evaluations[name].values)
    title = f"{name} stays at {reward_number(median(evaluations[name].values))}"
    return (
        DiagnosisCause(
            name=EVALUATION_STAYS,
            sentence=f"{title} in {count} evaluations, while the reward rose from {reward_number(before)} to "
            f"{reward_number(now)}. It may be harder, or not measure what is trained.",
            source="detector",
            title=title,
            explains=False,
            what_to_do=f"Read responses of {name}: are they cut, and are they sampled with the template, the length "
            "and the thinking of the training?",
            evidence={"evaluations": count, "before": before, "now": now},
        ),
    )


# Cached: a run is judged at each step, and evaluated at few.
@lru_cache(maxsize=1024)
def _open_fall(steps: tuple[int, ...], values: tuple[float, ...]) -> Event | None:
    """Return the first event of the fall that is open after the values; None if none is, or its noise is unknown."""
    state, found = RewardState(), None
    for step, value in zip(steps, values, strict=True):
        state, events = advance_reward(state, step, value, _SETTINGS)
        fired = (each for each in events if each.change == "fired" and "deviations" in each.evidence)
        found = (found or next(fired, None)) if state.is_low else None
    return found
