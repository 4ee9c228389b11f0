"""What is wrong with a run: causes of the mismatch by certainty and steps, then other faults, then consequences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from foreshock.api.diagnosis import CauseSource, DiagnosisCause
from foreshock.api.runs import ChangeRecord
from foreshock.diagnosis.changes import change_in_words
from foreshock.diagnosis.course import causes_of_course, grows_from_start
from foreshock.diagnosis.cut_responses import CUT_REWARDED
from foreshock.diagnosis.history import History, PastAlert, at_lag_zero
from foreshock.diagnosis.lag_growth import LAG_GROWS
from foreshock.diagnosis.lags import AT_LAG_ZERO
from foreshock.diagnosis.odd_steps import ODD_STEPS, cause_of
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE
from foreshock.diagnosis.reward_ceiling import REWARD_CEILING
from foreshock.diagnosis.stale_part import STALE_PART
from foreshock.diagnosis.sync_period import sync_period
from foreshock.lint.checks.places import OF_ENGINE

NOT_MEASURED: Final = frozenset(
    {
        "probabilities_as_log_probs",
        "negated_log_probs",
        "response_log_probs",
        "wrong_log_base",
        "raw_log_probs",
        "processed_log_probs",
        "shifted_log_probs",
        "rows_exchanged",
        "likelier_token_logged",
    }
)
"""Causes with which k3 does not measure the mismatch."""

_FEW_STEPS: Final = 3
"""A cause in fewer than one of so many of the steps that have a cause is named last."""

OF_SIGNAL: Final = frozenset({"advantages_against_rewards", "advantage_outlier", "non_finite_values"})
"""Faults of the learning signal: a reward may fall by them."""

OF_DATA: Final = OF_SIGNAL | {
    "aborted_responses",
    REWARD_CEILING,
    "context_limit",
    "unfinished_responses",
    "groups_not_prompts",
    "tokens_not_sampled",
    "same_response",
}
"""Faults of the data that leave k3 as it is; with one of them a run is not healthy."""

_YIELDS: Final[Mapping[str, Collection[str]]] = {
    "mismatch_everywhere": (
        ODD_STEPS,
        "mismatch_jump",
        "static_mismatch",
        "weights_not_delivered",
        "mismatch_without_updates",
        "mismatch_began",
    ),
    "mismatch_by_place": (STALE_PART,),
    LAG_GROWS: (STALE_PART,),
    "no_reward_spread": (REWARD_CEILING,),
    "all_truncated": (CUT_REWARDED,),
    "temperatures_differ": ("raw_log_probs", "weights_not_delivered"),
    "mean_ratio": (
        "temperatures_differ",
        "raw_log_probs",
        "weights_not_delivered",
        "mismatch_without_updates",
        "mismatch_began",
    ),
}
"""Cause → more specific causes of the same data. If one of these is found too, the first is not named."""

_CONFIRMED_BY: Final[Mapping[str, Collection[str]]] = {
    "temperature_of_trainer": ("temperature/trainer",),
    "temperatures_differ": ("temperature/trainer", "temperature/rollout"),
}
"""Cause of the lint → causes of the doctor that say the same, with the values of the setting."""

SET_APART: Final = frozenset({"placeholder_log_probs", "non_finite_log_probs", "positive_log_probs"})
"""Faults whose tokens are left out of k3, or hardly off: what makes the k3 of the others is not known by them."""

_EVERYWHERE: Final = "mismatch_everywhere"
"""A mismatch whose cause is not known: it explains nothing, and is no consequence of the mismatch."""

_TO_ROUTING: Final = (
    "Compare the experts that engine and trainer choose (a probe of the kind routing), or replay the engine's choice "
    "in the trainer."
)

_OF_GROWTH: Final = frozenset({"weights_not_delivered", "mismatch_without_updates"})
"""Causes seen in a growth from the first step on: a place says where, and not why."""

PLACE: Final = "mismatch_by_place"
"""The finding that says where the mismatch is, not what makes it."""

_SOURCES: Final[Sequence[CauseSource]] = ("notary", "doctor", "probe", "lint", "detector")

PROBES: Final[Collection[CauseSource]] = ("doctor", "probe")

REWARD_RULES: Final = frozenset({FALL_RULE, COLLAPSE_RULE})


def of_course(history: History, named: Collection[str]) -> tuple[DiagnosisCause, ...]:
    """Return the causes seen in k3 over the steps; if lags are mixed, in k3 of the tokens at lag 0.

    If all tokens are at one lag other than 0, only a jump is a cause: staleness may be present from the first step on.
    """
    steps, k3, quantity = history.course
    odd, end = history.odd, history.healthy_end
    found = () if odd is None else (cause_of(odd, end, quantity, history.resumes),)
    if (period := sync_period(steps, k3, end)) is not None:
        return (period,)
    lags = {lag for each in history.lags for lag in each.tokens}
    first: Mapping[int, float] = {}
    if not lags or lags == {AT_LAG_ZERO}:
        if all(each.tokens.keys() <= {AT_LAG_ZERO} for each in history.first_lags):
            first = dict(zip(history.first_k3.steps, history.first_k3.values, strict=True))
    elif len(lags) == 1:
        named = {*named, "staleness"}
    else:
        first = at_lag_zero(history.first_k3.steps, history.first_lags)
    rates, start = history.rates, min((*first, *steps), default=0)
    is_frozen = bool(rates.values) and max(rates.values) == 0.0 and rates.steps[0] <= start
    return (*found, *causes_of_course(steps, k3, named, end, quantity, first, is_frozen=is_frozen))


def with_change(cause: DiagnosisCause, changes: Sequence[ChangeRecord]) -> DiagnosisCause:
    """Return a change of k3 with what was announced, or seen in the setup, at its step."""
    known = [each for each in changes if each.step == cause.evidence.get("step")]
    if not known:
        return cause
    words = "; ".join(map(change_in_words, known))
    return replace(
        cause,
        title=f"{cause.title}, with a change: {words}",
        sentence=f"{cause.sentence} At that step changed: {words}.",
        what_to_do=f"Undo the change of step {known[0].step} ({words}), or ask if it may make so much: `foreshock "
        "doctor` with the step's weights.",
    )


def of_mixture(cause: DiagnosisCause) -> DiagnosisCause:
    """Return a mismatch at all positions of a mixture of experts with what is most likely there; the verdict on a step
    knows no kind of model, which may be declared later."""
    if cause.name != _EVERYWHERE:
        return cause
    sentence = f"{cause.sentence} In a mixture of experts, other experts for some tokens (routing) make it too."
    return replace(cause, sentence=sentence, what_to_do=f"{_TO_ROUTING} {cause.what_to_do}")


def of_engine(cause: DiagnosisCause, history: History) -> DiagnosisCause:
    """Return the place of one engine, with what it looks like if k3, nearly all of it there, grows from the start."""
    steps, k3 = (*history.first_k3.steps, *history.k3.steps), (*history.first_k3.values, *history.k3.values)
    if cause.name != PLACE or OF_ENGINE not in cause.title or not grows_from_start(steps, k3):
        return cause
    sentence = f"{cause.sentence} It has grown since step {steps[0]}: the engine looks as if it kept old weights."
    advice = f"Check that updates reach this engine: compare digests of its weights. {cause.what_to_do}"
    return replace(cause, sentence=sentence, what_to_do=advice)


def is_current(cause: DiagnosisCause, history: History) -> bool:
    """Return whether a cause applies to the history's steps; a probe's cause of an earlier step does not, unless the
    lint still sees it."""
    step = cause.evidence.get("step") if cause.source in PROBES else None
    first = next(iter(history.k3.steps), -1)
    return step is None or max(step, cause.evidence.get("newest_step", step)) >= first


def confirmed(found: Sequence[DiagnosisCause]) -> list[DiagnosisCause]:
    """Return the causes, those of the lint that the doctor has confirmed as one: its setting, in the lint's steps."""
    shown = {each.name for each in found if each.certainty == "shown"}
    by = {each.name: shown.intersection(_CONFIRMED_BY.get(each.name, ())) for each in found}
    seen = {name: each.evidence for each in found for name in by[each.name]}
    return [replace(each, evidence={**seen.get(each.name, {}), **each.evidence}) for each in found if not by[each.name]]


def ordered_causes(
    found: Sequence[DiagnosisCause], history: History, wrong: int | None, fell: int | None
) -> tuple[DiagnosisCause, ...]:
    """Return the causes: those of the mismatch first, proven ones before possible ones, the lint's in their order.

    A cause that a probe shows replaces possible ones. A place names no cause: a possible cause that the lint saw in as
    many steps stands above it. What began when the run went wrong, at step `wrong`, comes last.
    """
    probed = any(each.source in PROBES and each.certainty == "shown" and is_current(each, history) for each in found)
    names = {each.name for each in found}
    kept = [
        each
        for each in found
        if not (probed and each.certainty == "possible") and names.isdisjoint(_YIELDS.get(each.name, ()))
    ]
    kept = [_consequence(each, wrong) if _follows(each, wrong, fell) else each for each in kept]
    placed = max((_steps_of(each) for each in kept if each.name == PLACE), default=0)
    most = most_steps(kept)
    return tuple(
        sorted(
            kept,
            key=lambda each: (
                _follows(each, wrong, fell),
                not each.explains,
                not each.title,
                _rank(each, placed, most),
                _SOURCES.index(each.source),
            ),
        )
    )


def _rank(cause: DiagnosisCause, placed: int, most: int) -> int:
    """Return the place of a cause by its certainty; `placed` is the number of steps in which a place was seen.

    What the lint saw in few steps, of the `most` that have a cause, explains little of the mismatch.
    """
    if is_in_few_steps(cause, most):
        return 4
    if cause.certainty == "shown":
        return 2 if cause.name == PLACE else 0
    says_more = cause.name in _OF_GROWTH or (cause.source == "lint" and _steps_of(cause) >= placed)
    return 1 if says_more else 3


def most_steps(causes: Sequence[DiagnosisCause]) -> int:
    """Return the largest number of steps in which the lint saw a cause of the mismatch."""
    return max((_steps_of(each) for each in causes if each.explains and each.source == "lint"), default=0)


def is_in_few_steps(cause: DiagnosisCause, most: int) -> bool:
    """Return whether the lint saw a cause in few of the `most` steps that have one."""
    return cause.source == "lint" and _FEW_STEPS * _steps_of(cause) < most


def _steps_of(cause: DiagnosisCause) -> int:
    """Return the number of steps in which the lint saw a cause; 0 if that is not known."""
    return int(cause.evidence.get("steps", 0))


def went_wrong(grave: Sequence[PastAlert], history: History) -> int | None:
    """Return the first onset of a run whose reward fell; None if it did not, or the run began so."""
    if all(each.rule not in REWARD_RULES for each in grave):
        return None
    began = min(each.onset for each in grave)
    steps = (*history.first_k3.steps[:1], *history.k3.steps[:1], *history.reward.steps[:1])
    if began > min(steps, default=began):
        return began
    return min(each.onset for each in grave if each.rule in REWARD_RULES)


def _follows(cause: DiagnosisCause, wrong: int | None, fell: int | None) -> bool:
    """Return whether a fault that makes no mismatch began when the run went wrong, or later, or a mismatch after the
    reward fell at step `fell`."""
    if cause.source == "detector" and cause.explains:
        return fell is not None and int(cause.evidence.get("step", -1)) > fell
    if cause.name == _EVERYWHERE:
        return fell is not None and int(cause.evidence.get("first_step", -1)) > fell
    return wrong is not None and not cause.explains and int(cause.evidence.get("first_step", -1)) >= wrong


def _consequence(cause: DiagnosisCause, wrong: int | None) -> DiagnosisCause:
    sentence = f"{cause.sentence} It began after the run went wrong at step {wrong}: a consequence."
    return replace(cause, sentence=sentence, title="", what_to_do="")


def signal_of(fall: PastAlert, causes: Sequence[DiagnosisCause]) -> DiagnosisCause | None:
    """Return a proven fault of the learning signal that was there before the reward fell."""
    shown = (each for each in causes if each.certainty == "shown" and each.name in OF_SIGNAL)
    return next((each for each in shown if each.evidence.get("first_step", math.inf) <= fall.onset), None)
