"""Prompts that come again: the same ones in every step, or those of the run's first steps after a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.diagnosis.history import History
from foreshock.diagnosis.wording import plural

REPEATED_PROMPTS: Final = "repeated_prompts"

_LEAST_STEPS: Final = 10
_LEAST_AGAIN: Final = 5
_FEW: Final = 2.0
"""All steps together have fewer than so many times the prompts of one step."""


def repeated_prompts(history: History) -> tuple[DiagnosisCause, ...]:
    """Return what the least hashes of the prompts by step show: a loader that stands still, or begins again."""
    return _same_in_all(history.prompts) or _again(history.prompts, history.resumes)


def _same_in_all(prompts: Mapping[int, Sequence[int]]) -> tuple[DiagnosisCause, ...]:
    steps = sorted(prompts)[-64:]
    if len(steps) < _LEAST_STEPS:
        return ()
    # Of a step with more prompts only the least hashes are known: up to the least of their ends all are.
    size = max(len(prompts[step]) for step in steps)
    end = min(max(prompts[step]) if len(prompts[step]) == size else math.inf for step in steps)
    known = [{each for each in prompts[step] if each <= end} for step in steps]
    different, total = len(set().union(*known)), sum(map(len, known))
    if total < 2 * _LEAST_STEPS or different * len(steps) >= _FEW * total:
        return ()
    when = f"the newest {len(steps)} steps"
    title = f"the same prompts are in each of {when}"
    if different * len(steps) > total:
        title = f"the prompts of {when} repeat: each is in {total / different:.0f} of them on average"
    advice = "If it is not meant, check that the data loader moves on: a new iterator in each step begins again."
    return (_cause(title, f"{title}.", advice, steps[0]),)


def _again(prompts: Mapping[int, Sequence[int]], resumes: Sequence[int]) -> tuple[DiagnosisCause, ...]:
    resume = max(resumes, default=None)
    since = [] if resume is None else [step for step in sorted(prompts) if step >= resume]
    if resume is None or len(since) < _LEAST_AGAIN:
        return ()
    earlier = max((step for step in prompts if step < resume and prompts[step] == prompts[since[0]]), default=None)
    if earlier is None:
        return ()
    back = since[0] - earlier
    compared = [step for step in since if step - back < resume]
    alike = sum(prompts.get(step - back) == prompts[step] for step in compared)
    # Epochs of one order repeat before the resume as well.
    before = any(prompts.get(step - back) == prompts[step] for step in prompts if step < resume)
    if before or alike < max(_LEAST_AGAIN, 0.9 * len(compared)):
        return ()
    title = f"since the resume at step {resume} the prompts from step {earlier} on come again"
    sentence = f"{title}, in the same order: {plural(alike, 'step')} so far."
    advice = "Restore the data loader's position with the checkpoint: the prompts after it are never trained."
    return (_cause(title, sentence, advice, resume),)


def _cause(title: str, sentence: str, advice: str, step: int) -> DiagnosisCause:
    return DiagnosisCause(
        name=REPEATED_PROMPTS, title=title, sentence=sentence, source="detector", explains=False, what_to_do=advice,
        evidence={"at": step},
    )  # fmt: skip
