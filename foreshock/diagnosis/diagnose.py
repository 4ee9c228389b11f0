"""Make the one diagnosis of a run from its history.

`diagnose` is pure: equal histories give equal diagnoses, in whatever order the data arrived. The verdict is the gravest
open alert. It is "healthy" only if no alert above info is open and enough was measured. If too little was measured it
is "unknown", and `missing` lists what is missing.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from foreshock.api.diagnosis import CauseSource, Diagnosis, DiagnosisCause, DiagnosisEvent, MissingData, Verdict
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.collapse import TRAILING_VALUES, floor_of
from foreshock.diagnosis.course import causes_of_course
from foreshock.diagnosis.history import NEWEST_STEPS, WINDOW_STEPS, AwaitedShards, History, PastAlert, at_lag_zero
from foreshock.diagnosis.lags import AT_LAG_ZERO
from foreshock.diagnosis.mismatch_order import order_in_words
from foreshock.diagnosis.mismatch_rules import STEP_RULE
from foreshock.diagnosis.odd_steps import cause_of
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE, where_to_look
from foreshock.diagnosis.rule import CLIENT_LOSSES
from foreshock.diagnosis.short import short_of
from foreshock.diagnosis.wording import as_clause, number, percent, plural, ranks_in_words, reward_number
from foreshock.severity import severity_rank

JUDGE_VERSION: Final = "9"
"""Increased with each change of the text or the judgement, so that stored diagnoses are computed again."""

LEAST_MEASURED_STEPS: Final = 5
"""With fewer steps that have both log-probs, a run is not called healthy: most rules need so many in a row."""

LEAST_MEASURED_TOKENS: Final = 1000
"""With fewer measured tokens in the newest steps, a run is not called healthy."""

LEAST_REWARDS: Final = 15
"""With fewer rewards the headline does not say "has not fallen": the detector could not have found a fall."""

LITTLE_RECOVERY: Final = 0.25
"""If more than this fraction of a fall has been recovered, the headline gives both the level found and the present
one."""

LITTLE_FALL: Final = 0.1
"""A reward that is at most this fraction of the way from its best to the floor "has not fallen"."""

REWARD_RULES: Final = frozenset({FALL_RULE, COLLAPSE_RULE})

NOT_MEASURED: Final = frozenset(
    {
        "probabilities_as_log_probs",
        "negated_log_probs",
        "wrong_log_base",
        "raw_log_probs",
        "processed_log_probs",
        "shifted_log_probs",
    }
)
"""With one of these causes k3 is not the mismatch, however small it is."""

MUCH_LONGER: Final = 3.0
"""The factor from which a healthy headline names that lengths have grown or shrunk over the newest steps."""

MANY_CUT: Final = 0.2
"""The fraction of cut responses from which a healthy headline names them."""

AUXILIARY: Final = frozenset({"entropy_of_trainer"})
"""Faults of a column beside the log-probs: they stand below, and in no headline."""

MOST_TOLD: Final = 2
"""Largest number of causes in a headline."""

_YIELDS: Final[Mapping[str, Collection[str]]] = {
    "mismatch_everywhere": ("static_mismatch", "weights_not_delivered"),
    "temperatures_differ": ("raw_log_probs",),
    "mean_ratio": ("temperatures_differ", "raw_log_probs"),
}
"""Cause → the causes that replace it, since they say more about the same data."""

_SAID_BY: Final[Mapping[str, Collection[str]]] = {
    "log_probs_not_finite": ("placeholder_log_probs", "non_finite_log_probs")
}

_SOURCES: Final[Sequence[CauseSource]] = ("notary", "doctor", "probe", "lint", "detector")
_PROBES: Final[Collection[CauseSource]] = ("doctor", "probe")
_MOST_EVENTS = 50


def diagnose(history: History) -> Diagnosis:
    """Return the diagnosis, without the revision and time that it gets when it is stored."""
    alerts = sorted(_dated(history), key=lambda each: (each.onset, each.step, severity_rank(each.severity), each.rule))
    grave = [each for each in alerts if each.is_open and each.severity in ("critical", "warning")]
    if any(each.rule == COLLAPSE_RULE for each in grave):
        # A collapse of the reward replaces the fall that preceded it.
        grave = [each for each in grave if each.rule != FALL_RULE]
    named = {each.name for each in history.causes}
    fallen = min((each.onset for each in grave if each.rule in REWARD_RULES), default=None)
    causes = _causes((*history.causes, *_of_course(history, named)), history, fallen)
    told = [each for each in causes if _is_current(each, history)]
    blocking, lesser = _missing(history, alerts, causes, is_judged=bool(grave))
    verdict: Verdict
    since = None
    if grave:
        worst = min((each.severity for each in grave), key=severity_rank)
        verdict = "critical" if worst == "critical" else "warning"
        of_worst = sorted((each for each in grave if each.severity == worst), key=_told_first)
        since = of_worst[0].onset
        headline = f"{verdict.capitalize()} since step {since}: {_of_alerts(of_worst[0], grave, history, told)}."
    elif fault := next((each for each in told if each.name in NOT_MEASURED and each.certainty == "shown"), None):
        verdict, since = "warning", fault.evidence.get("first_step")
        clauses = (
            f"{fault.title or fault.sentence}, so that k3 is not the mismatch",
            _reward_clause(history, alerts),
            *_told([each for each in told if each.name not in AUXILIARY], {fault.name}),
        )
        when = "" if since is None else f" since step {since}"
        headline = f"Warning{when}: {'; '.join(filter(None, clauses))}."
    elif (since := _recurs_since(history)) is not None and not blocking:
        # Each of these steps is over at the next one, so that no alert stays open.
        verdict = "warning"
        clauses = (*_told([each for each in told if each.explains]), _reward_clause(history, alerts))
        headline = f"Warning since step {since}: {'; '.join(filter(None, clauses))}."
    elif blocking:
        verdict, since = "unknown", None
        clauses = (
            blocking[0].sentence,
            _reward_clause(history, alerts),
            *_told([each for each in told if each.name not in AUXILIARY], {*NOT_MEASURED, "identical_log_probs"}),
        )
        headline = f"Unknown: {'; '.join(filter(None, clauses))}."
    else:
        verdict, since = "healthy", None
        reward = _reward_clause(history, alerts) or "no reward is logged"
        # A probe's cause only says where a healthy mismatch comes from: no objection.
        objections = [
            *_told([each for each in told if each.source != "probe" and each.name not in AUXILIARY]),
            *_of_lengths(history),
        ]
        headline = f"Healthy: {'; '.join((_k3_clause(history), reward, *(f'but {each}' for each in objections)))}."
    ordered = sorted(grave, key=lambda each: (severity_rank(each.severity), _told_first(each)))
    return Diagnosis(
        verdict=verdict,
        since=since,
        headline=headline,
        short=short_of(verdict, headline, ordered, _of_mismatch(told), history),
        events=tuple(map(_event, _events(alerts))),
        causes=causes,
        next_steps=_next_steps(grave, causes, (*blocking, *lesser), history),
        missing=(*blocking, *lesser),
        observed_step=history.observed_step,
    )


def _recurs_since(history: History) -> int | None:
    """Return the first of the single bad steps if they recur; None otherwise."""
    odd = history.odd
    if odd is None or not odd.recur:
        return None
    return min([each.onset for each in history.alerts if each.rule == STEP_RULE], default=odd.groups[0][0])


def _dated(history: History) -> Sequence[PastAlert]:
    """Return the alerts; if bad steps recur, open ones on the mismatch began with the first of them."""
    first = _recurs_since(history)
    if first is None:
        return history.alerts
    return [
        replace(each, evidence={**each.evidence, "onset_step": first})
        if each.is_open and each.evidence.get("cause") == "mismatch" and each.onset > first
        else each
        for each in history.alerts
    ]


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
    if told := _told(making):
        return f"the data show: {'; '.join(told)}"
    return f"probably {as_clause(making[0].title)}" if making else ""


def _of_alerts(first: PastAlert, grave: Sequence[PastAlert], history: History, causes: Sequence[DiagnosisCause]) -> str:
    """Return the clauses of a headline: the oldest open alert of the worst severity, a fall of the reward, shown
    causes."""
    clauses = [_clause(first, history, _found_later(first))]
    fall = next((each for each in grave if each.rule in REWARD_RULES and each is not first), None)
    if fall is not None and first.rule not in REWARD_RULES:
        clauses.append(_clause(fall, history, f" from step {fall.onset} on"))
    others = len(grave) - len(clauses)
    if told := _of_mismatch(causes, _SAID_BY.get(first.rule, ())):
        clauses.append(told)
    if others > 0:
        clauses.append(plural(others, "more alert"))
    return "; ".join(clauses)


def _clause(alert: PastAlert, history: History, when: str) -> str:
    """Return the first sentence of an alert's reason as a clause with `when` it was.

    The clause of a fall gives the newest reward.
    """
    if alert.rule in REWARD_RULES and history.reward.values and "before" in alert.evidence:
        fell, now = _fall_in_words(alert.evidence, history.reward.newest(TRAILING_VALUES))
        order = order_in_words(alert.evidence)
        return fell + when + now + (f"; {order}" if order else "")
    first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", alert.why, maxsplit=1)[0].rstrip(".!? ")
    return as_clause(first_sentence) + when


def _found_later(alert: PastAlert) -> str:
    """Return the step at which an alert was found if that is after its onset, for a clause; else ""."""
    return f" (found at step {alert.step})" if alert.onset < alert.step else ""


def _fall_in_words(evidence: Mapping[str, Any], now: float) -> tuple[str, str]:
    """Return clauses on a fall and on the reward now; the second is empty unless a part of the fall is recovered."""
    before, found = float(evidence["before"]), float(evidence.get("now", now))
    is_recovering = now - found > LITTLE_RECOVERY * (before - found)
    fell = f"the reward fell from {reward_number(before)} to {reward_number(found if is_recovering else now)}"
    return fell, f" and is {reward_number(now)} now" if is_recovering else ""


def _events(alerts: Sequence[PastAlert]) -> Sequence[PastAlert]:
    """Return the newest alerts to tell, oldest first; no single step beside a graver alert that covers it."""
    covered = [each for each in alerts if each.is_open and each.evidence.get("cause") == "mismatch"]
    told = [each for each in alerts if not (each.rule == STEP_RULE and _is_covered(each, covered))]
    return told[-_MOST_EVENTS:]


def _is_covered(step: PastAlert, others: Sequence[PastAlert]) -> bool:
    return any(each.rule != STEP_RULE and each.severity != "info" and each.onset <= step.onset for each in others)


def _event(alert: PastAlert) -> DiagnosisEvent:
    where = f"Step {alert.onset}{_found_later(alert)}"
    sentence = f"{where}: {alert.rule.replace('_', ' ')}. {alert.why}"
    is_single = alert.rule == STEP_RULE and not alert.is_open and alert.cleared is not None
    if is_single and alert.cleared is not None:
        where = (
            f"Step {alert.onset}" if alert.cleared == alert.onset + 1 else f"Steps {alert.onset} to {alert.cleared - 1}"
        )
        sentence = f"{where}: k3 was {number(alert.value)}; it was back at step {alert.cleared}."
    return DiagnosisEvent(
        step=alert.step,
        onset=alert.onset,
        rule=alert.rule,
        severity=alert.severity,
        sentence=sentence,
        is_open=alert.is_open,
        is_single=is_single,
    )


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
        sentence = f"{lost.value:,.0f} logged items or rollouts did not arrive"
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
        sentence = "no step has both log-probs yet"
        if history.reported_k3 is not None:
            sentence += f"; the trainer reports a k3 of {number(history.reported_k3)}, which cannot be checked"
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
        sentence = f"{plural(measured, 'step')} with both log-probs, {LEAST_MEASURED_STEPS} are needed"
        if history.judged_k3 > history.healthy_end:
            sentence += (
                f"; k3 of {TRAINER_ROLLOUT} is {number(history.judged_k3)} so far, above the healthy range, which ends "
                f"at {number(history.healthy_end)}"
            )
        advice = "Wait for more steps."
    elif tokens < LEAST_MEASURED_TOKENS:
        sentence = f"{plural(tokens, 'token')} measured in the newest steps, {LEAST_MEASURED_TOKENS:,} are needed"
        advice = "Log more rollouts a step."
    elif history.newest_lags.hides_numerics and history.k3_now > history.healthy_end:
        sentence = history.newest_lags.untold(history.k3_now)
        advice = "Log some rollouts of the newest weights, or probe a step that has a checkpoint (`foreshock probe`)."
    elif history.judged_k3 > history.healthy_end:
        sentence = (
            f"{_k3_clause(history)}, above the healthy range, which ends at {number(history.healthy_end)}; "
            "more steps will tell if it stays there"
        )
        advice = "Wait for more steps, or log more rollouts a step."
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
            f"k3 of {TRAINER_ROLLOUT} is {number(others)} {when} without the largest token of each, and {number(now)} "
            "with it"
        )
    return f"k3 of {TRAINER_ROLLOUT} is {number(now)} {when}"


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
    return (*found, *causes_of_course(steps, k3, named, end, quantity, first))


def _reward_clause(history: History, alerts: Sequence[PastAlert]) -> str:
    """Return a clause on the reward: "has not fallen" only if no alert is open and its level is near the best."""
    reward = history.reward
    if not reward.values:
        return ""
    bests = (each.evidence["best"] for each in alerts if each.rule in REWARD_RULES and "best" in each.evidence)
    now, best = reward.newest(), max((reward.best(), *bests))
    text = reward_number(now)
    fallen = any(each.is_open and each.rule in REWARD_RULES for each in alerts)
    little = best - now <= LITTLE_FALL * (best - floor_of(min(reward.values)))
    if len(reward.values) < LEAST_REWARDS or fallen or not little:
        return f"the reward is {text}"
    when = f" in the newest {WINDOW_STEPS} steps" if len(reward.values) >= WINDOW_STEPS else ""
    return f"the reward, {text}, has not fallen{when}"


def _of_lengths(history: History) -> list[str]:
    """Return clauses on lengths that have changed much and on responses that are cut: no rule calls them unhealthy."""
    found, lengths = [], history.length
    if len(lengths.values) >= 3 * NEWEST_STEPS and (before := median(list(lengths.values[:NEWEST_STEPS]))) > 0.0:
        times = lengths.newest() / before
        if max(times, 1.0 / max(times, 1e-9)) >= MUCH_LONGER:
            grown = f"grown × {number(times)}" if times > 1.0 else f"shrunk ÷ {number(1.0 / times)}"
            found.append(f"responses have {grown} since step {lengths.steps[0]}")
    if history.truncated.newest() >= MANY_CUT:
        found.append(f"{percent(history.truncated.newest())} of the responses are cut")
    return found


def _is_current(cause: DiagnosisCause, history: History) -> bool:
    """Return whether a cause applies to the history's steps; a probe's cause of an earlier step does not."""
    step = cause.evidence.get("step") if cause.source in _PROBES else None
    return step is None or not history.k3.steps or step >= history.k3.steps[0]


def _causes(found: Sequence[DiagnosisCause], history: History, fallen: int | None) -> tuple[DiagnosisCause, ...]:
    """Return the causes: those of the mismatch first, proven ones before possible ones, the lint's in their order.

    A cause that a probe shows replaces possible ones. What the reward's fall at step `fallen` made comes last.
    """
    probed = any(each.source in _PROBES and each.certainty == "shown" and _is_current(each, history) for each in found)
    names = {each.name for each in found}
    kept = [
        each
        for each in found
        if not (probed and each.certainty == "possible") and names.isdisjoint(_YIELDS.get(each.name, ()))
    ]
    kept = [_consequence(each, fallen) if _follows(each, fallen) else each for each in kept]
    return tuple(
        sorted(
            kept,
            key=lambda each: (
                _follows(each, fallen),
                not each.explains,
                each.certainty != "shown",
                _SOURCES.index(each.source),
            ),
        )
    )


def _follows(cause: DiagnosisCause, fallen: int | None) -> bool:
    """Return whether a fault that makes no mismatch began after the reward fell."""
    return fallen is not None and not cause.explains and int(cause.evidence.get("first_step", fallen)) > fallen


def _consequence(cause: DiagnosisCause, fallen: int | None) -> DiagnosisCause:
    sentence = f"{cause.sentence} It began after the fall of the reward at step {fallen}: a consequence."
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
    found = [
        _way_back(each, min(other.onset for other in grave), history) for each in ordered if each.rule == COLLAPSE_RULE
    ]
    found += [each.what_to_do for each in causes]
    found += _to_doctor(causes, history)
    found += [each.what_to_do for each in ordered if each.rule != COLLAPSE_RULE]
    found += [each.what_to_do for each in missing]
    return tuple(dict.fromkeys(filter(None, found)))


def _to_doctor(causes: Sequence[DiagnosisCause], history: History) -> list[str]:
    """Return the next step after a probe has found the link: which setting it is. None if the mismatch is healthy."""
    probed = next((each for each in causes if each.source == "probe" and _is_current(each, history)), None)
    is_known = any(each.source == "doctor" and each.certainty == "shown" for each in causes)
    if probed is None or is_known or not history.judged_k3 > history.healthy_end:
        return []
    return [f"Find the setting: `foreshock doctor RUN --step {probed.evidence['step']}` tries what this link may do."]


def _way_back(collapse: PastAlert, onset: int, history: History) -> str:
    """Return what to do after a collapse; `onset` is the first step of all that is wrong.

    A checkpoint from between this step and the fall holds weights that are damaged already.
    """
    onset = min([onset, *(int(collapse.evidence[name]) for name in _ONSETS if name in collapse.evidence)])
    earlier = [step for step in history.checkpoints if step < onset]
    if earlier:
        where = f"the checkpoint of step {earlier[-1]}, the newest from before step {onset}"
    else:
        where = f"a checkpoint from before step {onset}, where it began"
        where += "; no announced one is so old" if history.checkpoints else ""
    return f"Stop, or go back to {where}. {where_to_look(collapse.evidence)}"


_ONSETS = ("onset_step", "k3_onset_step")
