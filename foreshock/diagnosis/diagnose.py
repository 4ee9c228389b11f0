"""Make the one diagnosis of a run from its history.

`diagnose` is pure: equal histories give equal diagnoses, in whatever order the data arrived. The verdict is the gravest
open alert. It is "healthy" only if no alert above info is open and enough was measured. If too little was measured it
is "unknown", and `missing` lists what is missing.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from foreshock.api.diagnosis import CauseSource, Diagnosis, DiagnosisCause, DiagnosisEvent, MissingData, Verdict
from foreshock.api.runs import ChangeRecord
from foreshock.diagnosis.border import contradiction
from foreshock.diagnosis.changes import change_in_words
from foreshock.diagnosis.collapse import TRAILING_VALUES, floor_of
from foreshock.diagnosis.course import causes_of_course
from foreshock.diagnosis.episodes import MISMATCH, POLICY, episodes_of, family_of, onset_of
from foreshock.diagnosis.evaluations import fall_of_evaluation, stays_at_zero
from foreshock.diagnosis.history import (
    NEWEST_STEPS,
    WINDOW_STEPS,
    AwaitedShards,
    History,
    PastAlert,
    SteppedValues,
    at_lag_zero,
)
from foreshock.diagnosis.lags import AT_LAG_ZERO
from foreshock.diagnosis.mismatch_order import order_in_words
from foreshock.diagnosis.mismatch_rules import K3, PROBE, STEP_RULE
from foreshock.diagnosis.odd_steps import ODD_STEPS, cause_of
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE, level_after_fall, where_to_look
from foreshock.diagnosis.reward_outage import outage_of
from foreshock.diagnosis.rule import CLIENT_LOSSES
from foreshock.diagnosis.short_headline import short_of
from foreshock.diagnosis.weights import WEIGHTS_DIFFER
from foreshock.diagnosis.wording import as_clause, number, percent, plural, ranks_in_words, reward_number
from foreshock.severity import severity_rank

JUDGE_VERSION: Final = "14"
"""Increased with each change of the text or the judgement, so that stored diagnoses are computed again."""

LEAST_MEASURED_STEPS: Final = 5
"""Fewest steps with both log-probs of a run that is called healthy. Most rules need as many in a row."""

LEAST_MEASURED_TOKENS: Final = 1000
"""Fewest measured tokens in the newest steps of a run that is called healthy."""

LEAST_REWARDS: Final = 15
"""Fewest rewards for the words "is near its best" in a headline: with fewer the detector finds no fall."""

NEVER_REWARDED: Final = "the reward is 0 in every step"

LITTLE_FALL: Final = 0.1
"""A reward that is at most this fraction of the way from its best to the floor "is near its best"."""

REWARD_RULES: Final = frozenset({FALL_RULE, COLLAPSE_RULE})

NOT_MEASURED: Final = frozenset(
    {
        "probabilities_as_log_probs",
        "negated_log_probs",
        "response_log_probs",
        "wrong_log_base",
        "raw_log_probs",
        "processed_log_probs",
        "shifted_log_probs",
        "likelier_token_logged",
    }
)
"""Causes with which k3 does not measure the mismatch."""

_FEW_STEPS: Final = 3
"""A cause in fewer than one of so many of the steps that have a cause is named last."""

_OF_SIGNAL: Final = frozenset({"advantages_against_rewards", "advantage_outlier", "non_finite_values"})
"""Faults of the learning signal: a reward may fall by them."""

_OF_DATA: Final = _OF_SIGNAL | {"aborted_responses", "unfinished_responses", "groups_not_prompts"}
"""Faults of the data that leave k3 as it is; with one of them a run is not healthy."""

MUCH_LONGER: Final = 3.0
"""The factor from which a healthy headline names that lengths have grown or shrunk over the newest steps."""

_LENGTH_BEFORE: Final = "baseline_length"
"""The evidence of an alert on lengths that holds the length before them."""

MANY_CUT: Final = 0.2
"""The fraction of cut responses from which a healthy headline names them."""

MOST_FOLDED: Final = 4
"""Largest number of folded alerts that an event names."""

MOST_TOLD: Final = 2
"""Largest number of causes in a headline."""

_YIELDS: Final[Mapping[str, Collection[str]]] = {
    "mismatch_everywhere": (
        ODD_STEPS,
        "mismatch_jump",
        "static_mismatch",
        "weights_not_delivered",
        "mismatch_without_updates",
        "mismatch_began",
    ),
    "temperatures_differ": ("raw_log_probs",),
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

_SAID_BY: Final[Mapping[str, Collection[str]]] = {
    "log_probs_not_finite": ("placeholder_log_probs", "non_finite_log_probs"),
    "truncation_high": ("all_truncated",),
}
"""Rule → the causes that say what its alert says, and more."""

_WAITING: Final = "; more steps will tell if it stays"
"""What a headline says instead of a possible cause."""

_SET_APART: Final = frozenset({"placeholder_log_probs", "non_finite_log_probs", "positive_log_probs"})
"""Faults whose tokens are left out of k3, or hardly off: what makes the k3 of the others is not known by them."""

_FEW: Final = _SET_APART - {"non_finite_log_probs"}

_PLACE: Final = "mismatch_by_place"
"""The finding that says where the mismatch is, not what makes it."""

_SOURCES: Final[Sequence[CauseSource]] = ("notary", "doctor", "probe", "lint", "detector")
_PROBES: Final[Collection[CauseSource]] = ("doctor", "probe")
_MOST_EVENTS = 50


def diagnose(history: History) -> Diagnosis:
    """Return the diagnosis, without the revision and time that it gets when it is stored."""
    alerts = sorted(_dated(history), key=lambda each: (each.onset, each.step, severity_rank(each.severity), each.rule))
    grave = [each for each in alerts if each.is_open and each.severity in ("critical", "warning")]
    if collapse := next((each for each in grave if each.rule == COLLAPSE_RULE), None):
        # A collapse of the reward replaces the fall that preceded it, and began with it.
        oldest = min((each for each in grave if each.rule in REWARD_RULES), key=lambda each: each.onset)
        before = {name: oldest.evidence[name] for name in ("before",) if name in oldest.evidence}
        began = replace(collapse, evidence={**collapse.evidence, **before, "onset_step": oldest.onset})
        grave = [began if each is collapse else each for each in grave if each.rule != FALL_RULE]
    named = {each.name for each in history.causes if each.explains}
    fallen = _went_wrong(grave, history)
    fell = min((each.onset for each in grave if each.rule in REWARD_RULES), default=None)
    found = (
        *history.causes,
        *(_with_change(each, history.changes) for each in _of_course(history, named)),
        *fall_of_evaluation(history.evaluations),
        *stays_at_zero(history.evaluations, history.reward),
        *outage_of(history.reward),
    )
    causes = _causes(_confirmed(found), history, fallen, fell)
    told = [each for each in causes if _is_current(each, history)]
    blocking, lesser = _missing(history, alerts, causes, is_judged=bool(grave))
    verdict: Verdict
    since = None
    if grave:
        worst = min((each.severity for each in grave), key=severity_rank)
        verdict = "critical" if worst == "critical" else "warning"
        story = _story(grave)
        since = onset_of(story[0], story)
        if story[0].rule in REWARD_RULES and (signal := _signal_of(story[0], told)) is not None:
            since = min(since, int(signal.evidence["first_step"]))
        clauses = _of_alerts(story[0], grave, history, told)
        # Single steps that are over have dates of their own; their alerts wait for some more healthy steps.
        is_past = _is_over(story[0], history, told) and history.odd is not None and not history.odd.recur
        when = "" if is_past else f" since step {since}"
        headline = _headline(f"{verdict.capitalize()}{when}", clauses)
    elif fault := _proven_fault(told):
        verdict, since = "warning", fault.evidence.get("first_step")
        meaning = ", so that k3 is not the mismatch" if fault.name in NOT_MEASURED else ""
        clauses = [
            f"{fault.title or fault.sentence}{meaning}",
            *_told(told, {fault.name}),
            "" if meaning or not history.k3.steps else _k3_clause(history),
            _reward_clause(history, alerts),
        ]
        headline = _headline("Warning" if since is None else f"Warning since step {since}", clauses)
    elif (since := _recurs_since(history)) is not None and not blocking:
        # Each of these steps is over at the next one, so that no alert stays open.
        verdict = "warning"
        clauses = [*_told([each for each in told if each.explains]), _reward_clause(history, alerts)]
        headline = _headline(f"Warning since step {since}", clauses)
    elif (since := _above_since(history)) is not None and not blocking:
        # So few steps that no rule on their mean is certain, but each of them is above the range.
        verdict = "warning"
        levels = f"{number(history.judged_k3)}, healthy to {number(history.healthy_end)}"
        clauses = [
            f"the mismatch (k3) is {levels}, in each of {len(history.course[0])} steps",
            _of_mismatch(told),
            _reward_clause(history, alerts),
        ]
        headline = _headline(f"Warning since step {since}", clauses)
    elif blocking:
        verdict, since = "unknown", None
        possible = _possible_cause(told, history)
        clauses = [
            blocking[0].sentence.removesuffix(_WAITING) if possible else blocking[0].sentence,
            *_told(told, {*NOT_MEASURED, "identical_log_probs"}),
            possible,
            _reward_clause(history, alerts),
        ]
        headline = _headline("Unknown", clauses)
    else:
        verdict, since = "healthy", None
        reward = _reward_clause(history, alerts) or "no reward is logged"
        # A probe's cause only says where a healthy mismatch comes from: no objection.
        objections = [*_told([each for each in told if each.source != "probe"]), *_of_lengths(history)]
        headline = _headline("Healthy", [_k3_clause(history), reward, *(f"but {each}" for each in objections)], last=1)
        first, but, more = headline.partition("; but ")
        headline = first + but + more.replace("; but ", "; and ")
    ordered = sorted(grave, key=lambda each: (severity_rank(each.severity), _told_first(each)))
    return Diagnosis(
        verdict=verdict,
        since=since,
        headline=headline,
        short=short_of(verdict, headline, ordered, _of_mismatch(told), history),
        events=_in_order(
            [*map(_of_resume, history.resumes), *map(_of_change, history.changes), *_events(alerts, history)]
        ),
        causes=causes,
        next_steps=_next_steps(grave, causes, (*blocking, *lesser), history),
        missing=(*blocking, *lesser),
        observed_step=history.observed_step,
    )


_NEAR_BEST: Final = re.compile(r"^the reward, (.+), is near its best.*")
_LAST_PARENTHESES: Final = re.compile(r" \([^()]*\)$")

MOST_CHARACTERS: Final = 160
"""Largest length of a headline; what does not fit stands below it."""


def _headline(start: str, clauses: Sequence[str], last: int | None = None) -> str:
    """Return a headline of the clauses that fit, the first ones before the others, and that at `last` at the end."""
    room = MOST_CHARACTERS - len(start) - len(": .")
    told = [each for each in clauses if each]
    last = None if last is None or last >= len(told) else last
    order = [place for place in range(1, len(told)) if place != last] + ([] if last is None else [last])
    kept = {0: _shortened(told[0], room)}
    room -= len(kept[0])
    for place in order:
        # What stands in parentheses may be left out, that the data show it, and a second cause.
        bare = told[place].removeprefix("the data show: ")
        one = told[place].partition("; ")[0]
        forms = [form for each in (told[place], bare, one) for form in (each, _LAST_PARENTHESES.sub("", each))]
        forms.append(_NEAR_BEST.sub(r"the reward is \1", told[place]))
        clause = next((each for each in forms if len(each) + 2 <= room), forms[0])
        if len(clause) + 2 <= room:
            kept[place] = clause
            room -= len(clause) + 2
    return f"{start}: {'; '.join(kept[place] for place in sorted(kept))}."


def _shortened(clause: str, room: int) -> str:
    """Return a clause up to its last part that fits."""
    if len(clause) <= room:
        return clause
    cut = max(clause.rfind(each, 0, room) for each in ("; ", ": ", ", "))
    return clause[:cut] if cut > 0 else f"{clause[: room - 1].rsplit(' ', 1)[0]}…"


def _proven_fault(told: Sequence[DiagnosisCause]) -> DiagnosisCause | None:
    """Return the first fault of the data that is proven and that makes a run unhealthy whatever k3 is."""
    shown = (each for each in told if each.certainty == "shown")
    return next((each for each in shown if each.name in NOT_MEASURED | _OF_DATA), None)


def _above_since(history: History) -> int | None:
    """Return the first step of the window if k3 is above its range in every one of enough steps; None otherwise."""
    steps, values, _ = history.course
    is_above = len(steps) >= NEWEST_STEPS and min(values) > history.healthy_end
    return steps[0] if is_above and history.judged_k3 > history.healthy_end else None


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

    It is the oldest of those as grave as any, or the mismatch if it rose before the reward fell. Lengths are not told
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
    story = min(chosen, key=lambda each: min(alert.onset for alert in each))
    if fall is not None and fall.rule == COLLAPSE_RULE and family_of(story[0].rule, story[0].evidence) == "length":
        story = next(each for each in found if fall in each)
    return sorted(story, key=lambda each: (severity_rank(each.severity), _told_first(each)))


def _told_first(alert: PastAlert) -> tuple[int, bool, int]:
    """Return the sort key of a headline's alerts: the oldest first, of one step those on k3."""
    return alert.onset, not alert.rule.startswith("mismatch"), alert.step


def _told(causes: Sequence[DiagnosisCause], said: Collection[str] = ()) -> list[str]:
    """Return the proven causes that a headline names, as clauses, without those that are already `said`."""
    shown = (each for each in causes if each.certainty == "shown" and each.title and each.name not in said)
    return [each.title for each in shown][:MOST_TOLD]


def _of_mismatch(causes: Sequence[DiagnosisCause], said: Collection[str] = ()) -> str:
    """Return the clause of a headline on what makes the mismatch: proven causes, else the first possible one."""
    making = [each for each in causes if each.explains and each.title and each.name not in said]
    named = [each for each in making if each.name != _PLACE]
    told = _told(named) or ([] if making[:1] == named[:1] else _told(making))
    if told:
        return f"the data show: {'; '.join(told)}"
    return f"probably {as_clause(making[0].title).removeprefix('it looks as if ')}" if making else ""


def _possible_cause(causes: Sequence[DiagnosisCause], history: History) -> str:
    """Return the clause on a possible cause of a k3 above its range, if none is proven."""
    if not history.k3_now_of_others > history.healthy_end or any(each.certainty == "shown" for each in causes):
        return ""
    return _of_mismatch(causes, NOT_MEASURED)


def _of_alerts(
    first: PastAlert, grave: Sequence[PastAlert], history: History, causes: Sequence[DiagnosisCause]
) -> list[str]:
    """Return the clauses of a headline: the oldest open alert of the worst severity, a fall of the reward, shown
    causes."""
    said = _SAID_BY.get(first.rule, ())
    fall = next((each for each in grave if each.rule in REWARD_RULES), None)
    # Single tokens that are left out make no reward fall.
    told = _of_mismatch(causes, said if fall is None else {*said, *_FEW})
    never = NEVER_REWARDED if _is_never_rewarded(history) else ""
    # A cause or the reward says more than when the alert was found, which the event says too.
    earlier = None if fall is not first else _changed_first(first, grave)
    clauses = [_clause(first, history, "" if told or never or earlier else _found_later(first))]
    if same := _told([each for each in causes if each.name in said]):
        clauses = same[:1]
    if told and (first.rule == WEIGHTS_DIFFER or _is_over(first, history, causes)):
        # The notary names the engine and what it holds, single steps that are over their k3.
        clauses, told = [told.removeprefix("the data show: ")], ""
    if fall is not None and first.rule not in REWARD_RULES:
        clauses.append(_clause(fall, history, f" from step {fall.onset} on"))
    if fall is first and (signal := _signal_of(first, causes)) is not None:
        clauses.append(f"the data show: {signal.title} since step {signal.evidence['first_step']}")
    if told:
        clauses.append(told)
    if fall is not None and "before" in fall.evidence and family_of(first.rule, first.evidence) != MISMATCH:
        # After the mismatch, the dates of the two tell their order.
        clauses.append(order_in_words(fall.evidence))
    if earlier is not None:
        what = _name(earlier)
        moved = f"the {what.removesuffix(' rise')} rose" if what.endswith(" rise") else f"{what} came"
        clauses.append(f"{moved} first, from step {earlier.onset}")
    if fall is not None:
        clauses += _of_lengths(history)
    elif said:
        clauses += _told([each for each in causes if not each.explains], said)
    clauses.append(never)
    if fall is None and not told and not never and _is_healthy_mismatch(grave, history):
        clauses.append(_k3_clause(history))
    named = [each for each in (first, fall, earlier) if each is not None]
    others = sum(all(each not in episode for each in named) for episode in episodes_of(grave))
    if others > 0:
        clauses.append(plural(others, "more episode"))
    return clauses


def _signal_of(fall: PastAlert, causes: Sequence[DiagnosisCause]) -> DiagnosisCause | None:
    """Return a proven fault of the learning signal that was there before the reward fell."""
    shown = (each for each in causes if each.certainty == "shown" and each.name in _OF_SIGNAL)
    return next((each for each in shown if each.evidence.get("first_step", math.inf) <= fall.onset), None)


def _changed_first(fall: PastAlert, grave: Sequence[PastAlert]) -> PastAlert | None:
    """Return the oldest alert on the policy or the gradient if it began before the reward fell."""
    policy = (each for each in grave if family_of(each.rule, each.evidence) == POLICY and each.onset < fall.onset)
    return min(policy, key=lambda each: each.onset, default=None)


def _is_healthy_mismatch(grave: Sequence[PastAlert], history: History) -> bool:
    """Return whether k3 of the newest step is known and in its range, and no alert is of the mismatch."""
    is_measured = bool(history.k3.steps) and history.k3.steps[-1] == history.observed_step
    is_healthy = is_measured and history.judged_k3 <= history.healthy_end
    return is_healthy and not any(map(_is_of_mismatch, grave))


def _is_over(first: PastAlert, history: History, causes: Sequence[DiagnosisCause]) -> bool:
    """Return whether an open alert on the mismatch is of single bad steps, and k3 is healthy now."""
    is_healthy = _is_of_mismatch(first) and history.judged_k3 <= history.healthy_end
    return is_healthy and bool(causes) and causes[0].name == ODD_STEPS


def _clause(alert: PastAlert, history: History, when: str) -> str:
    """Return the first sentence of an alert's reason as a clause with `when` it was.

    The clause of a fall gives the newest reward.
    """
    if alert.rule in REWARD_RULES and history.reward.values and "before" in alert.evidence:
        fell, now = _fall_in_words(alert.evidence, history.reward.newest(TRAILING_VALUES))
        return fell + when + now
    if _is_of_mismatch(alert) and history.judged_k3 > history.healthy_end:
        levels = f"{number(history.judged_k3)}, healthy to {number(history.healthy_end)}"
        return f"the mismatch (k3) is {levels}{when}"
    first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])|; ", alert.why, maxsplit=1)[0].rstrip(".!? ")
    return as_clause(first_sentence) + when


def _found_later(alert: PastAlert) -> str:
    """Return the step at which an alert was found if that is after its onset, for a clause; else ""."""
    return f" (found at step {alert.step})" if alert.onset < alert.step else ""


def _fall_in_words(evidence: Mapping[str, Any], now: float) -> tuple[str, str]:
    """Return clauses on a fall and on the reward now; the second is empty unless a part of the fall is recovered."""
    level, is_recovering = level_after_fall(evidence, now)
    fell = f"the reward fell from {reward_number(float(evidence['before']))} to {reward_number(level)}"
    return fell, f" and is {reward_number(now)} now" if is_recovering else ""


def _events(alerts: Sequence[PastAlert], history: History) -> tuple[DiagnosisEvent, ...]:
    """Return the newest alerts as events, oldest first; of an episode only the first one tells.

    An open alert on a single step says nothing beside a graver one on the mismatch, and a past one beside the list of
    all steps that recur.
    """
    recur = history.odd is not None and history.odd.recur
    is_graver = any(each.is_open and each.severity != "info" and _is_of_mismatch(each) for each in alerts)
    alerts = [each for each in alerts if not (is_graver and each.is_open and each.rule == STEP_RULE)]
    heads = {id(episode[0]): episode for episode in episodes_of(each for each in alerts if each.is_open)}
    return tuple(_event(each, heads.get(id(each), ()), recur=recur) for each in alerts[-_MOST_EVENTS:])


def _of_change(change: ChangeRecord) -> DiagnosisEvent:
    said = f"Step {change.step}: {change_in_words(change)}."
    return DiagnosisEvent(
        step=change.step, onset=change.step, rule="change", severity="info", sentence=said, is_open=False, is_told=True
    )  # fmt: skip


def _of_resume(step: int) -> DiagnosisEvent:
    said = f"Step {step}: the run was resumed."
    return DiagnosisEvent(
        step=step, onset=step, rule="resume", severity="info", sentence=said, is_open=False, is_told=True
    )  # fmt: skip


def _in_order(events: Sequence[DiagnosisEvent]) -> tuple[DiagnosisEvent, ...]:
    return tuple(sorted(events, key=lambda each: each.onset))


def _is_of_mismatch(alert: PastAlert) -> bool:
    return family_of(alert.rule, alert.evidence) == MISMATCH


def _event(alert: PastAlert, episode: Sequence[PastAlert], *, recur: bool) -> DiagnosisEvent:
    """Return the event of an alert; `episode` has the alerts of its episode if this alert stands for it."""
    onset = onset_of(alert, episode)
    where = f"Step {onset}{_found_later(alert)}"
    sentence = f"{where}: {_name(alert)}. {alert.why}"
    if len(episode) > 1:
        named = [_name(each) for each in episode[1 : MOST_FOLDED + 1]]
        more = len(episode) - 1 - len(named)
        sentence += f" With it: {', '.join(named)}{f' and {more} more' if more else ''}."
    is_single = alert.rule == STEP_RULE and not alert.is_open and alert.cleared is not None
    if is_single and alert.cleared is not None:
        where = (
            f"Step {alert.onset}" if alert.cleared == alert.onset + 1 else f"Steps {alert.onset} to {alert.cleared - 1}"
        )
        at = "" if where.startswith("Step ") else f" at step {alert.onset}"
        sentence = f"{where}: k3 was {number(alert.value)}{at}; it was back at step {alert.cleared}."
    return DiagnosisEvent(
        step=alert.step,
        onset=onset,
        rule=alert.rule,
        severity=alert.severity,
        sentence=sentence,
        is_open=alert.is_open,
        is_told=bool(episode) or (is_single and not recur),
    )


def _name(alert: PastAlert) -> str:
    return alert.rule.replace("_", " ")


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
    elif history.newest_lags.hides_numerics and history.k3_now > history.healthy_end:
        sentence = history.newest_lags.untold(history.k3_now)
        advice = "Log some rollouts of the newest weights, or probe a step that has a checkpoint (`foreshock probe`)."
    elif history.judged_k3 > history.healthy_end and _above_since(history) is None:
        healthy = f"healthy to {number(history.healthy_end)}"
        sentence = f"{_k3_clause(history)}, {healthy}{_WAITING}"
        advice = "Wait for more steps, or run `foreshock doctor` with the weights of this one."
    else:
        return []
    return [MissingData(sentence=sentence, what_to_do=advice)]


def _waits(awaited: AwaitedShards) -> MissingData:
    since = datetime.fromtimestamp(awaited.since_us / 1e6, UTC).strftime("%H:%M")
    ranks = ranks_in_words(awaited.missing)
    sentence = f"step {awaited.step} is waiting for {ranks} of {awaited.expected} since {since} UTC"
    return MissingData(sentence=sentence, what_to_do="Look whether these ranks still run and reach the service.")


def _k3_clause(history: History) -> str:
    when = f"in the newest {min(NEWEST_STEPS, len(history.k3.steps))} measured steps"
    if history.undeclared:
        when += ", if the logged μ sampled the tokens, which is not declared"
    levels, now, others = history.newest_lags, history.k3_now, history.k3_now_of_others
    if levels.is_mixed and not levels.hides_numerics:
        return levels.in_words(now, when)
    if now > history.healthy_end >= others:
        return (
            f"the mismatch (k3) is {number(others)} {when} without the largest token of each, and {number(now)} with it"
        )
    return f"the mismatch (k3) is {number(now)} {when}"


def _of_course(history: History, named: Collection[str]) -> tuple[DiagnosisCause, ...]:
    """Return the causes seen in k3 over the steps; if lags are mixed, in k3 of the tokens at lag 0.

    If all tokens are at one lag other than 0, only a jump is a cause: staleness may be present from the first step on.
    """
    steps, k3, quantity = history.course
    odd, end = history.odd, history.healthy_end
    found = () if odd is None else (cause_of(odd, end, quantity, history.resumes),)
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


def _with_change(cause: DiagnosisCause, changes: Sequence[ChangeRecord]) -> DiagnosisCause:
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


def _is_never_rewarded(history: History) -> bool:
    values = history.reward.values
    return len(values) >= LEAST_REWARDS and min(values) == max(values) == 0.0


def _reward_clause(history: History, alerts: Sequence[PastAlert]) -> str:
    """Return a clause on the reward: "is near its best" only if no alert is open."""
    reward = history.reward
    if not reward.values:
        return ""
    bests = (each.evidence["best"] for each in alerts if each.rule in REWARD_RULES and "best" in each.evidence)
    now, best = reward.newest(), max((reward.best(), *bests))
    text = reward_number(now)
    fallen = any(each.is_open and each.rule in REWARD_RULES for each in alerts)
    fallen = fallen or bool(outage_of(reward))
    little = best - now <= LITTLE_FALL * (best - floor_of(min(reward.values)))
    if _is_never_rewarded(history):
        return NEVER_REWARDED
    if len(reward.values) < LEAST_REWARDS or fallen or not little:
        return f"the reward is {text}{'' if fallen else _before_change(reward, now, history.changes)}"
    # It may have fallen in between, and be back.
    when = f" of the newest {WINDOW_STEPS} steps" if len(reward.values) >= WINDOW_STEPS else ""
    return f"the reward, {text}, is near its best{when}"


def _before_change(reward: SteppedValues, now: float, changes: Sequence[ChangeRecord]) -> str:
    """Return the level of the reward before the newest change if it fell with it, in parentheses; else ""."""
    if not changes:
        return ""
    at = max(each.step for each in changes)
    pairs = list(zip(reward.steps, reward.values, strict=True))
    before = [value for step, value in pairs if step < at][-NEWEST_STEPS:]
    since = [value for step, value in pairs if step >= at][:NEWEST_STEPS]
    if min(len(before), len(since)) < NEWEST_STEPS or max(now, median(since)) >= min(before):
        return ""
    return f" ({reward_number(median(before))} before the change at step {at})"


def _of_lengths(history: History) -> list[str]:
    """Return clauses on lengths that have changed much and on responses that are cut: no rule calls them unhealthy."""
    found, lengths = [], history.length
    if len(lengths.values) >= 3 * NEWEST_STEPS:
        since, before = lengths.steps[0], median(list(lengths.values[:NEWEST_STEPS]))
        # A growth that began before these steps has left an alert, mostly an info, with the length before it.
        surges = [each for each in history.alerts if _LENGTH_BEFORE in each.evidence and each.onset < since]
        if surges:
            first = min(surges, key=lambda each: each.onset)
            since, before = first.onset, float(first.evidence[_LENGTH_BEFORE])
        times = lengths.newest() / before if before > 0.0 else 1.0
        if max(times, 1.0 / max(times, 1e-9)) >= MUCH_LONGER:
            grown = f"grown × {number(times)}" if times > 1.0 else f"shrunk ÷ {number(1.0 / times)}"
            found.append(f"responses have {grown} since step {since}")
    if history.truncated.newest() >= MANY_CUT:
        found.append(f"{percent(history.truncated.newest())} of the responses are cut")
    return found


def _is_current(cause: DiagnosisCause, history: History) -> bool:
    """Return whether a cause applies to the history's steps; a probe's cause of an earlier step does not, unless the
    lint still sees it."""
    step = cause.evidence.get("step") if cause.source in _PROBES else None
    first = next(iter(history.k3.steps), -1)
    return step is None or max(step, cause.evidence.get("newest_step", step)) >= first


def _confirmed(found: Sequence[DiagnosisCause]) -> list[DiagnosisCause]:
    """Return the causes, those of the lint that the doctor has confirmed as one: its setting, in the lint's steps."""
    shown = {each.name for each in found if each.certainty == "shown"}
    by = {each.name: shown.intersection(_CONFIRMED_BY.get(each.name, ())) for each in found}
    seen = {name: each.evidence for each in found for name in by[each.name]}
    return [replace(each, evidence={**seen.get(each.name, {}), **each.evidence}) for each in found if not by[each.name]]


def _causes(
    found: Sequence[DiagnosisCause], history: History, wrong: int | None, fell: int | None
) -> tuple[DiagnosisCause, ...]:
    """Return the causes: those of the mismatch first, proven ones before possible ones, the lint's in their order.

    A cause that a probe shows replaces possible ones. A place names no cause: a possible cause that the lint saw in as
    many steps stands above it. What began when the run went wrong, at step `wrong`, comes last.
    """
    probed = any(each.source in _PROBES and each.certainty == "shown" and _is_current(each, history) for each in found)
    names = {each.name for each in found}
    kept = [
        each
        for each in found
        if not (probed and each.certainty == "possible") and names.isdisjoint(_YIELDS.get(each.name, ()))
    ]
    kept = [_consequence(each, wrong) if _follows(each, wrong, fell) else each for each in kept]
    placed = max((_steps_of(each) for each in kept if each.name == _PLACE), default=0)
    most = max((_steps_of(each) for each in kept if each.explains and each.source == "lint"), default=0)
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
    if cause.source == "lint" and _FEW_STEPS * _steps_of(cause) < most:
        return 4
    if cause.certainty == "shown":
        return 2 if cause.name == _PLACE else 0
    return 1 if cause.source == "lint" and _steps_of(cause) >= placed else 3


def _steps_of(cause: DiagnosisCause) -> int:
    """Return the number of steps in which the lint saw a cause; 0 if that is not known."""
    return int(cause.evidence.get("steps", 0))


def _went_wrong(grave: Sequence[PastAlert], history: History) -> int | None:
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
    return wrong is not None and not cause.explains and int(cause.evidence.get("first_step", -1)) >= wrong


def _consequence(cause: DiagnosisCause, wrong: int | None) -> DiagnosisCause:
    sentence = f"{cause.sentence} It began after the run went wrong at step {wrong}: a consequence."
    return replace(cause, sentence=sentence, title="", what_to_do="")


def _next_steps(
    grave: Sequence[PastAlert],
    causes: Sequence[DiagnosisCause],
    missing: Sequence[MissingData],
    history: History,
) -> tuple[str, ...]:
    """Return what to do, each advice once: first for a collapse of the reward, then for the causes, for the other
    alerts (the gravest first) and for what is missing."""
    ordered = sorted(grave, key=lambda each: (severity_rank(each.severity), each.step, each.rule))
    wrong = _went_wrong(grave, history)
    collapse = next((each for each in ordered if each.rule == COLLAPSE_RULE), None)
    setting = _named_setting(causes, history)
    found, is_said = [], False
    if collapse is not None and (signal := _signal_of(collapse, causes)) is not None:
        setting, wrong = signal, min(collapse.onset if wrong is None else wrong, int(signal.evidence["first_step"]))
    if collapse is not None:
        # After a fall that the mismatch followed, the setting is not the reason of the fall.
        follows = collapse.evidence.get("first") in _MISMATCH_LATER
        is_said = setting is not None and (setting.name in _OF_SIGNAL or not follows)
        look = setting.what_to_do if setting is not None and is_said else where_to_look(collapse.evidence)
        found = [f"{_way_back(collapse, collapse.onset if wrong is None else wrong, history)} {look}"]
    found += [
        each.what_to_do
        for each in causes
        if not (is_said and each is setting) and (each.name != _PLACE or setting is None)
    ]
    found += _to_doctor(causes, history)
    found += [PROBE] if not grave and _above_since(history) is not None else []
    # What follows from the same cause has the same remedy. A fault that the data prove needs no probe to be found.
    heads = [each[0] for each in episodes_of(grave) if each[0].rule != COLLAPSE_RULE]
    if collapse is not None:
        # What to do for a policy that changes asks whether the reward falls.
        heads = [each for each in heads if family_of(each.rule, each.evidence) != POLICY]
    advised = {each.name for each in causes if each.what_to_do}
    of_alerts = [each.what_to_do for each in heads if advised.isdisjoint(_SAID_BY.get(each.rule, ()))]
    found += [each for each in of_alerts if each != PROBE or not _is_known(causes, history)]
    found += [each.what_to_do for each in missing]
    return tuple(dict.fromkeys(filter(None, found)))


def _is_known(causes: Sequence[DiagnosisCause], history: History) -> bool:
    """Return whether the lint, the notary or the doctor has proven what makes the mismatch, not only its place."""
    first = next(iter(causes), None)
    if first is None or first.certainty != "shown" or not first.explains or first.name in {_PLACE, *_SET_APART}:
        return False
    return first.source in ("lint", "notary", "doctor") and _is_current(first, history)


def _to_doctor(causes: Sequence[DiagnosisCause], history: History) -> list[str]:
    """Return the next step after a probe has found the link: which setting it is. None if the mismatch is healthy."""
    probed = next((each for each in causes if each.source == "probe" and _is_current(each, history)), None)
    is_known = any(each.source == "doctor" and each.certainty == "shown" for each in causes)
    if probed is None or is_known or not history.judged_k3 > history.healthy_end:
        return []
    return [f"Find the setting: `foreshock doctor RUN --step {probed.evidence['step']}` tries what this link may do."]


def _named_setting(causes: Sequence[DiagnosisCause], history: History) -> DiagnosisCause | None:
    """Return the first cause if it is a setting that the doctor names, so that no further look is needed."""
    first = next(iter(causes), None)
    if first is None or first.source != "doctor" or first.certainty != "shown" or not first.what_to_do:
        return None
    return first if _is_current(first, history) else None


_MISMATCH_LATER = ("reward", "no rise")


def _way_back(collapse: PastAlert, onset: int, history: History) -> str:
    """Return the checkpoint to go back to; `onset` is the first step of all that went wrong after the run began.

    A checkpoint from between this step and the fall holds weights that are damaged already.
    """
    onset = min([onset, *(int(collapse.evidence[name]) for name in _ONSETS if name in collapse.evidence)])
    earlier = [step for step in history.checkpoints if step < onset]
    if earlier:
        where = f"the checkpoint of step {earlier[-1]}, the newest from before step {onset}"
    else:
        where = f"a checkpoint from before step {onset}, where it began"
        where += "; no announced one is so old" if history.checkpoints else ""
    return f"Stop, or go back to {where}."


_ONSETS = ("onset_step", "k3_onset_step")
