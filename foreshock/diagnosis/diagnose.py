"""Make the one diagnosis of a run from its history.

`diagnose` is pure: equal histories give equal diagnoses, in whatever order the data arrived. The verdict is the gravest
open alert. It is "healthy" only if no alert above info is open and enough was measured. If too little was measured it
is "unknown", and `missing` lists what is missing.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from foreshock.api.diagnosis import Diagnosis, DiagnosisCause, MissingData, Verdict
from foreshock.diagnosis.beside_fall import entropy_in_fall, fall_that_is_over, resume_in_fall, spike_before
from foreshock.diagnosis.border import contradiction
from foreshock.diagnosis.causes import (
    NOT_MEASURED,
    OF_DATA,
    PLACE,
    REWARD_RULES,
    confirmed,
    is_current,
    is_in_few_steps,
    most_steps,
    of_course,
    of_engine,
    of_mixture,
    ordered_causes,
    signal_of,
    went_wrong,
    with_change,
)
from foreshock.diagnosis.collapse import TRAILING_VALUES
from foreshock.diagnosis.cut_responses import cut_in_fall, cut_rewarded
from foreshock.diagnosis.episodes import MISMATCH, episodes_of, family_of, is_of_mismatch, onset_of
from foreshock.diagnosis.evaluations import fall_of_evaluation, stays_at_zero
from foreshock.diagnosis.events import _in_order, _of_change, _of_resume, events_of
from foreshock.diagnosis.frozen_rate import zero_rate
from foreshock.diagnosis.headline import (
    clauses_of_alerts,
    fitted,
    is_over,
    k3_clause,
    of_lengths,
    of_mismatch,
    possible_cause,
    reward_clause,
    told_titles,
)
from foreshock.diagnosis.history import NEWEST_STEPS, AwaitedShards, History, PastAlert
from foreshock.diagnosis.lag_growth import growing_lag
from foreshock.diagnosis.mismatch_order import MISMATCH_LATER
from foreshock.diagnosis.mismatch_rules import K3, STEP_RULE
from foreshock.diagnosis.next_steps import above_since, next_steps
from foreshock.diagnosis.rate_change import rate_before_fall
from foreshock.diagnosis.repeated_prompts import repeated_prompts
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE
from foreshock.diagnosis.reward_ceiling import ceiling_of
from foreshock.diagnosis.reward_outage import outage_of
from foreshock.diagnosis.rule import CLIENT_LOSSES
from foreshock.diagnosis.short_headline import short_of
from foreshock.diagnosis.source_rewards import sources_in_fall
from foreshock.diagnosis.stale_part import STALE_PART, stale_part
from foreshock.diagnosis.tool_answers import tools_in_fall
from foreshock.diagnosis.wording import number, plural, ranks_in_words
from foreshock.lint.checks.duplicates import ALIKE, COPIES
from foreshock.severity import severity_rank

JUDGE_VERSION: Final = "19"
"""Increased with each change of the text or the judgement, so that stored diagnoses are computed again."""

LEAST_MEASURED_STEPS: Final = 5
"""Fewest steps with both log-probs of a run that is called healthy. Most rules need as many in a row."""

LEAST_MEASURED_TOKENS: Final = 1000
"""Fewest measured tokens in the newest steps of a run that is called healthy."""

_NEARLY_BACK: Final = 0.75
_LEAST_OF_PLACE: Final = 3
"""Fewest steps with a place of a mismatch that is healthy: in one or two it is chance."""

_SHORT: Final = 4.0
"""Tokens: responses shorter than this are named where too few tokens are measured."""

_WAITING: Final = "; more steps will tell if it stays"
"""What a headline says instead of a possible cause."""


def diagnose(history: History) -> Diagnosis:
    """Return the diagnosis, without the revision and time that it gets when it is stored."""
    alerts = sorted(_dated(history), key=lambda each: (each.onset, each.step, severity_rank(each.severity), each.rule))
    grave = [each for each in alerts if each.is_open and each.severity in ("critical", "warning")]
    if any(map(is_of_mismatch, grave)):
        grave = [each for each in grave if not _is_nearly_back(each, history)]
    if collapse := next((each for each in grave if each.rule == COLLAPSE_RULE), None):
        # A collapse of the reward replaces the fall that preceded it, and began with it.
        oldest = min((each for each in grave if each.rule in REWARD_RULES), key=lambda each: each.onset)
        before = {name: oldest.evidence[name] for name in ("before",) if name in oldest.evidence}
        began = replace(collapse, evidence={**collapse.evidence, **before, "onset_step": oldest.onset})
        grave = [began if each is collapse else each for each in grave if each.rule != FALL_RULE]
    most = most_steps(history.causes)
    named = {each.name for each in history.causes if each.explains and not is_in_few_steps(each, most)}
    fallen = went_wrong(grave, history)
    fall = min((each for each in grave if each.rule in REWARD_RULES), key=lambda each: each.onset, default=None)
    fell = None if fall is None else fall.onset
    found = (
        *history.causes,
        *(with_change(each, history.changes) for each in of_course(history, named)),
        *fall_of_evaluation(history.evaluations),
        *stays_at_zero(history.evaluations, history.reward),
        *(outage_of(history.reward) or (fall_that_is_over(history) if fall is None else ())),
        *repeated_prompts(history),
        *zero_rate(history.rates),
        *growing_lag(history),
        *ceiling_of(history.reward),
        *cut_rewarded(history),
        *stale_part(history),
        *sources_in_fall(history, fall),
        *(() if fall is None else _of_fall(fall, history)),
    )
    found = tuple(of_engine(each, history) for each in found)
    if history.model_kind == "moe":
        found = tuple(map(of_mixture, found))
    if any(map(_is_chance, found)) and history.judged_k3 <= history.healthy_end:
        found = tuple(each for each in found if not _is_chance(each))
    causes = ordered_causes(confirmed(found), history, fallen, fell)
    told = [each for each in causes if is_current(each, history)]
    blocking, lesser = _missing(history, alerts, causes, is_judged=bool(grave))
    verdict: Verdict
    since = None
    if grave:
        worst = min((each.severity for each in grave), key=severity_rank)
        verdict = "critical" if worst == "critical" else "warning"
        story = _story(grave)
        since = onset_of(story[0], story)
        if story[0].rule in REWARD_RULES and (signal := signal_of(story[0], told)) is not None:
            since = min(since, int(signal.evidence["first_step"]))
        clauses = clauses_of_alerts(story[0], grave, history, told)
        fault = _proven_fault(told)
        if fault is not None and verdict == "warning" and family_of(story[0].rule, story[0].evidence) == "length":
            # Lengths are told after what is wrong with the data.
            clauses, since = [fault.title, *clauses], min(since, int(fault.evidence.get("first_step", since)))
        # Single steps that are over have dates of their own; their alerts wait for some more healthy steps.
        is_past = is_over(story[0], history, told) and history.odd is not None and not history.odd.recur
        when = "" if is_past else f" since step {since}"
        headline = fitted(f"{verdict.capitalize()}{when}", clauses)
    elif fault := _proven_fault(told):
        verdict, since = "warning", fault.evidence.get("first_step")
        meaning = ", so that k3 is not the mismatch" if fault.name in NOT_MEASURED else ""
        clauses = [
            f"{fault.title or fault.sentence}{meaning}",
            *told_titles(told, {fault.name}),
            "" if meaning or not history.k3.steps else k3_clause(history),
            reward_clause(history, alerts),
        ]
        headline = fitted("Warning" if since is None else f"Warning since step {since}", clauses)
    elif (since := _recurs_since(history)) is not None and not blocking:
        # Each of these steps is over at the next one, so that no alert stays open.
        verdict = "warning"
        clauses = [*told_titles([each for each in told if each.explains]), reward_clause(history, alerts)]
        headline = fitted(f"Warning since step {since}", clauses)
    elif (since := above_since(history)) is not None and not blocking:
        # So few steps that no rule on their mean is certain, but each of them is above the range.
        verdict = "warning"
        levels = f"{number(history.judged_k3)}, healthy to {number(history.healthy_end)}"
        clauses = [
            f"the mismatch (k3) is {levels}, in each of {len(history.course[0])} steps",
            of_mismatch(told),
            reward_clause(history, alerts),
        ]
        headline = fitted(f"Warning since step {since}", clauses)
    elif blocking:
        verdict, since = "unknown", None
        possible = possible_cause(told, history)
        clauses = [
            blocking[0].sentence.removesuffix(_WAITING) if possible else blocking[0].sentence,
            *of_lengths(history),
            *told_titles(told, {*NOT_MEASURED, "identical_log_probs"}),
            possible,
            reward_clause(history, alerts),
        ]
        headline = fitted("Unknown", clauses)
    else:
        verdict, since = "healthy", None
        reward = reward_clause(history, alerts) or "no reward is logged"
        # A probe's cause only says where a healthy mismatch comes from: no objection.
        objections = [*told_titles([each for each in told if each.source != "probe"]), *of_lengths(history)]
        headline = fitted("Healthy", [k3_clause(history), reward, *(f"but {each}" for each in objections)], last=1)
        first, but, more = headline.partition("; but ")
        headline = first + but + more.replace("; but ", "; and ")
    ordered = sorted(grave, key=lambda each: (severity_rank(each.severity), _told_first(each)))
    return Diagnosis(
        verdict=verdict,
        since=since,
        headline=headline,
        short=short_of(verdict, headline, ordered, of_mismatch(told), history),
        events=_in_order(
            [*map(_of_resume, history.resumes), *map(_of_change, history.changes), *events_of(alerts, history)]
        ),
        causes=causes,
        next_steps=next_steps(grave, causes, (*blocking, *lesser), history),
        missing=(*blocking, *lesser),
        observed_step=history.observed_step,
    )


def _of_fall(fall: PastAlert, history: History) -> Sequence[DiagnosisCause]:
    """Return what came with a fall of the reward and explains it."""
    return (
        *(rate_before_fall(history.rates, fall, history.resumes) or resume_in_fall(fall, history)),
        *spike_before(fall, history.gradients),
        *tools_in_fall(fall, history),
        *(cut_in_fall(fall, history) or entropy_in_fall(fall, history)),
    )


def _is_chance(cause: DiagnosisCause) -> bool:
    return cause.name == PLACE and int(cause.evidence.get("steps", _LEAST_OF_PLACE)) < _LEAST_OF_PLACE


def _is_nearly_back(alert: PastAlert, history: History) -> bool:
    """Return whether an alert is of a fall of the reward of which most is recovered: other alerts are the news."""
    if alert.rule != FALL_RULE or not history.reward.values or not {"before", "now"} <= alert.evidence.keys():
        return False
    before, found = float(alert.evidence["before"]), float(alert.evidence["now"])
    return history.reward.newest(TRAILING_VALUES) - found >= _NEARLY_BACK * (before - found)


def _proven_fault(told: Sequence[DiagnosisCause]) -> DiagnosisCause | None:
    """Return the first fault of the data that is proven and that makes a run unhealthy whatever k3 is."""
    grave = NOT_MEASURED | OF_DATA | {STALE_PART}
    shown = (each for each in told if each.certainty == "shown")
    return next((each for each in shown if each.name in grave or each.title.startswith((ALIKE, COPIES))), None)


def _recurs_since(history: History) -> int | None:
    """Return the first of the single bad steps if they recur; None otherwise."""
    odd = history.odd
    if odd is None or not odd.recur:
        return None
    return min([odd.groups[0][0], *(each.onset for each in history.alerts if each.rule == STEP_RULE)])


def _dated(history: History) -> Sequence[PastAlert]:
    """Return the alerts, the open ones on the mismatch with the date of the first bad step that recurs, or with that at
    which the detector of the reward saw k3 rise before the fall."""
    recurs, rose = _recurs_since(history), None
    for each in history.alerts:
        if each.is_open and each.rule in REWARD_RULES and each.evidence.get("first") == "mismatch":
            rose = int(each.evidence["k3_onset_step"])
    first = min((each for each in (recurs, rose) if each is not None), default=None)
    if first is None:
        return history.alerts
    of_mismatch = [each for each in history.alerts if each.is_open and each.evidence.get("cause") == "mismatch"]
    oldest = min((each.onset for each in of_mismatch), default=first)
    return [
        replace(each, evidence={**each.evidence, "onset_step": first})
        if each in of_mismatch and (each.onset == oldest or recurs is not None) and each.onset > first
        else each
        for each in history.alerts
    ]


def _story(grave: Sequence[PastAlert]) -> Sequence[PastAlert]:
    """Return the episode that a headline tells first, its oldest alert of the worst severity first.

    It is the oldest of those as grave as any, or the mismatch if it rose before the reward fell; not a mismatch that is
    as grave as a fall and did not rise before it. Lengths are not told
    before a collapse of the reward.
    """
    fall = next((each for each in grave if each.rule in REWARD_RULES), None)
    found = episodes_of(grave)
    worst = severity_rank(min((each.severity for each in grave), key=severity_rank))
    if fall is not None and fall.evidence.get("first") == "mismatch":
        first = next((each for each in found if family_of(each[0].rule, each[0].evidence) == MISMATCH), None)
        if first is not None:
            return first
    chosen = [each for each in found if any(severity_rank(alert.severity) == worst for alert in each)]
    if fall is not None and fall.severity == "warning" and fall.evidence.get("first") in MISMATCH_LATER:
        # A mismatch that is no more than a warning, and did not rise before the reward fell, does not explain the fall.
        chosen = [each for each in chosen if family_of(each[0].rule, each[0].evidence) != MISMATCH] or chosen
    story = min(chosen, key=lambda each: min(alert.onset for alert in each))
    if fall is not None and fall.rule == COLLAPSE_RULE and family_of(story[0].rule, story[0].evidence) == "length":
        story = next(each for each in found if fall in each)
    return sorted(story, key=lambda each: (severity_rank(each.severity), _told_first(each)))


def _told_first(alert: PastAlert) -> tuple[int, bool, int]:
    """Return the sort key of a headline's alerts: the oldest first, of one step those on k3."""
    return alert.onset, not alert.rule.startswith("mismatch"), alert.step


def _missing(
    history: History, alerts: Sequence[PastAlert], causes: Sequence[DiagnosisCause], is_judged: bool
) -> tuple[list[MissingData], list[MissingData]]:
    """Return what must be known before a run is called healthy, then what else is missing.

    `is_judged`: an alert is open, so too little data blocks nothing.
    """
    blocking = []
    lesser = [_waits(each) for each in sorted(history.awaited, key=lambda each: each.step)]
    if history.observed_step is not None:
        blocking = _untold(history, alerts, causes, is_judged)
    elif lesser:
        blocking.append(lesser.pop(0))
    else:
        blocking.append(MissingData(sentence="no step is complete yet", what_to_do="Wait for the first step."))
    if history.observed_step is not None and not history.reward.values:
        sentence = "no reward is logged, so that its fall cannot be seen"
        lesser.append(MissingData(sentence=sentence, what_to_do="Log rewards with the rollouts, or as a scalar."))
    for lost in (each for each in alerts if each.rule == CLIENT_LOSSES and each.is_open):
        sentence = f"{lost.value:,.0f} of the logged items and rollouts did not arrive"
        lesser.append(MissingData(sentence=sentence, what_to_do=lost.what_to_do))
    of_kind = (each.evidence.get("cause") == "mismatch" for each in alerts if each.is_open)
    if history.model_kind is None and any(of_kind):
        sentence = "the kind of model is not declared, so that the ranges are those of a dense model"
        lesser.append(MissingData(sentence=sentence, what_to_do="Declare model_kind, dense or moe."))
    return blocking, [*lesser, *history.undeclared, *history.unlogged]


def _untold(
    history: History, alerts: Sequence[PastAlert], causes: Sequence[DiagnosisCause], is_judged: bool
) -> list[MissingData]:
    """Return the first thing that closed steps lack before a run can be called healthy; empty if they lack nothing."""
    copied = next((each for each in alerts if each.rule == "scores_identical" and each.is_open), None)
    advice = "Log rollout_log_probs and trainer_log_probs of the same tokens."
    measured, tokens = len(history.k3.steps), sum(history.tokens[-NEWEST_STEPS:])
    if not measured:
        sentence = "no step has both log-probs"
        if K3 in history.reported:
            judged = contradiction(history.reported) or "cannot be checked"
            sentence += f"; the trainer reports a k3 of {number(history.reported[K3])}, which {judged}"
    elif history.newest_step is not None and history.k3.steps[-1] < history.newest_step - NEWEST_STEPS:
        sentence = f"no step since {history.k3.steps[-1]} has both log-probs"
    elif copied is not None:
        sentence = "the trainer's log-probs equal the engine's bit for bit, as copies do, so nothing is measured"
        advice = copied.what_to_do
    elif is_judged:
        return []
    elif wrong := next((each for each in causes if each.name in NOT_MEASURED), None):
        sentence = f"{wrong.title or wrong.sentence}, so that k3 is not the mismatch"
        advice = wrong.what_to_do
    elif measured < LEAST_MEASURED_STEPS:
        sentence = f"{plural(measured, 'step')} with both log-probs ({LEAST_MEASURED_STEPS} needed)"
        if history.judged_k3 > history.healthy_end:
            now, end = number(history.judged_k3), number(history.healthy_end)
            sentence += f"; mismatch (k3) {now} so far, healthy to {end}"
        advice = "Wait for more steps."
    elif tokens < LEAST_MEASURED_TOKENS:
        sentence = f"{plural(tokens, 'token')} measured in the newest steps, {LEAST_MEASURED_TOKENS:,} are needed"
        advice = "Log more rollouts a step."
        if history.length.newest() < _SHORT:
            sentence += f"; the responses have {plural(round(history.length.newest()), 'token')}"
            advice = "Read some responses: a policy may learn to answer with nothing."
    elif (
        history.newest_lags.hides_numerics
        and history.k3_now > history.healthy_end
        and all(each.name != STALE_PART for each in causes)
    ):
        sentence = history.newest_lags.untold(history.k3_now)
        advice = "Log some rollouts of the newest weights, or probe a step that has a checkpoint (`foreshock probe`)."
    elif history.judged_k3 > history.healthy_end and above_since(history) is None:
        healthy = f"healthy to {number(history.healthy_end)}"
        sentence = f"{k3_clause(history)}, {healthy}{_WAITING}"
        advice = "Wait for more steps, or run `foreshock doctor` with the weights of this one."
    else:
        return []
    return [MissingData(sentence=sentence, what_to_do=advice)]


def _waits(awaited: AwaitedShards) -> MissingData:
    since = datetime.fromtimestamp(awaited.since_us / 1e6, UTC).strftime("%H:%M")
    ranks = ranks_in_words(awaited.missing)
    sentence = f"step {awaited.step} is waiting for {ranks} of {awaited.expected} since {since} UTC"
    return MissingData(sentence=sentence, what_to_do="Look whether these ranks still run and reach the service.")
