"""What came with a fall of the reward: a resume, a gradient far above all others, an entropy that moved.

A fall that is over is told too, so that a run that is healthy now says that it was not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import NEWEST_STEPS, History, PastAlert, SteppedValues
from foreshock.diagnosis.mismatch_order import MISMATCH_LATER
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE, MEDIAN_TO_MEAN
from foreshock.diagnosis.statistics import step_noise
from foreshock.diagnosis.wording import number, reward_number

ENTROPY_MOVED: Final = "entropy_moved"
FELL_AT_RESUME: Final = "fell_at_resume"
GRADIENT_SPIKE: Final = "gradient_spike"
FELL_BEFORE: Final = "fell_before"

_LEAST_STEPS: Final = 5
_RISE, _FALL, _Z = 1.3, 0.5, 4.0
"""Factors from which on an entropy has risen or fallen, and its least standard errors."""
_NEAR: Final = 2
"""Steps by which the onset of a fall may miss the step that made it."""
_TIMES_OF_LARGEST: Final = 5.0
"""Least factor of a gradient over the largest of the others about a fall."""
_BEYOND_NOISE: Final = 3.0
"""A fall that is over is told if it was so many standard deviations: a smaller one may be noise."""


def newest_fall(alerts: Sequence[PastAlert], since: int) -> PastAlert | None:
    """Return the newest collapse of the reward that cleared after step `since`; None if it may have been noise."""
    found = [
        each
        for each in alerts
        if each.rule == COLLAPSE_RULE and not each.is_open and each.cleared is not None and each.cleared > since
    ]
    newest = max(found, key=lambda each: each.step, default=None)
    is_clear = newest is not None and float(newest.evidence.get("deviations", math.inf)) >= _BEYOND_NOISE
    return newest if is_clear else None


def fall_that_is_over(history: History) -> tuple[DiagnosisCause, ...]:
    """Return the newest fall of the reward among the window's steps that is over, with the gradient before it."""
    fall = newest_fall(history.alerts, min(history.reward.steps, default=0))
    if fall is None or fall.cleared is None or not {"before", "now"} <= fall.evidence.keys():
        return ()
    levels = f"from {reward_number(float(fall.evidence['before']))} to {reward_number(float(fall.evidence['now']))}"
    spike = spike_before(fall, history.gradients)
    after = "".join(f" ({each.title})" for each in spike)
    # The alert on a lesser fall clears after that on the collapse, when most of it is recovered.
    alike = (each.cleared for each in history.alerts if each.rule in (COLLAPSE_RULE, FALL_RULE))
    back = max(each for each in alike if each is not None and each >= fall.cleared)
    title = f"the reward fell {levels} at step {fall.onset}, and is back since step {back}{after}"
    # Without a reason there is nothing to do, and what is missing comes first.
    return (_cause(FELL_BEFORE, title, f"{title}.", spike[0].what_to_do if spike else "", fall.onset),)


def spike_before(fall: PastAlert, gradients: SteppedValues) -> tuple[DiagnosisCause, ...]:
    """Return a gradient norm just before a fall that is far above all others about it."""
    pairs = list(zip(gradients.steps, gradients.values, strict=True))
    near = [each for each in pairs if fall.onset - _NEAR - 1 <= each[0] <= fall.onset + 1]
    if len(pairs) < 2 * _LEAST_STEPS or not near:
        return ()
    step, value = max(near, key=lambda each: each[1])
    others = [each for at, each in pairs if at < step]
    if len(others) < _LEAST_STEPS or value < _TIMES_OF_LARGEST * max(others):
        return ()
    title = f"a gradient norm of {number(value)} at step {step}"
    sentence = f"{title}: it was {number(max(others))} or less before. The reward fell from step {fall.onset} on."
    advice = (
        f"Look at the batch of step {step}, and clip the gradient or leave out updates whose norm is so far above the "
        "usual one."
    )
    return (_cause(GRADIENT_SPIKE, title, sentence, advice, step),)


def resume_in_fall(fall: PastAlert, history: History) -> tuple[DiagnosisCause, ...]:
    """Return the resume at which the reward fell, with what the policy was like before and since."""
    step = next((each for each in history.resumes if abs(fall.onset - each) <= _NEAR), None)
    if step is None:
        return ()
    moved = []
    for name, series in (("entropy", history.entropy), ("length", history.length)):
        pairs = list(zip(series.steps, series.values, strict=True))
        before = [value for at, value in pairs if at < step][-_LEAST_STEPS:]
        since = [value for at, value in pairs if at >= step][:_LEAST_STEPS]
        if len(before) == len(since) == _LEAST_STEPS and (min(since) > max(before) or max(since) < min(before)):
            moved.append(f"the {name} went from {number(median(before))} to {number(median(since))}")
    also = f", and {' and '.join(moved)}" if moved else ""
    title = f"it fell at the resume at step {step}{also}"
    sentence = f"{title}. What one resume changes at once is no training: other weights, or a state not restored."
    advice = (
        f"Check which checkpoint was loaded at step {step}: reward, entropy and length like those of the first steps "
        "are those of the initial weights. Then compare the states of optimizer, schedule and data loader."
    )
    return (_cause(FELL_AT_RESUME, title, sentence, advice, step),)


def entropy_in_fall(fall: PastAlert, history: History) -> tuple[DiagnosisCause, ...]:
    """Return the entropy as a cause if it rose or fell far as the reward fell, and the mismatch did not rise first."""
    pairs = list(zip(history.entropy.steps, history.entropy.values, strict=True))
    before = [value for step, value in pairs if step < fall.onset][-NEWEST_STEPS:]
    since = [value for step, value in pairs if step >= fall.onset][-NEWEST_STEPS:]
    if fall.evidence.get("first") not in MISMATCH_LATER or min(len(before), len(since)) < _LEAST_STEPS:
        return ()
    was, now = median(before), median(since)
    noise = MEDIAN_TO_MEAN * step_noise([value for _, value in pairs])
    if abs(now - was) < _Z * noise * math.sqrt(1.0 / len(before) + 1.0 / len(since)) or _FALL * was < now < _RISE * was:
        return ()
    rises = now > was
    title = f"the entropy {'rose' if rises else 'fell'} from {number(was)} to {number(now)} with it"
    sentence = f"As the reward fell, from step {fall.onset} on, the entropy {title.partition(' entropy ')[2]}."
    to_noise = "the policy goes towards noise: look at the entropy bonus, the upper clip range and the learning rate."
    narrows = "the policy narrows: read some responses, and look at the learning rate and the entropy bonus."
    advice = f"If the prompts are as before, {to_noise if rises else narrows}"
    return (_cause(ENTROPY_MOVED, title, sentence.replace(" with it.", "."), advice, fall.onset),)


def _cause(name: str, title: str, sentence: str, advice: str, step: int) -> DiagnosisCause:
    return DiagnosisCause(
        name=name, title=title, sentence=sentence, source="detector", explains=False, what_to_do=advice,
        evidence={"at": step},
    )  # fmt: skip
