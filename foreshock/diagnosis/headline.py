"""The headline of a diagnosis: the clauses that fit into 160 characters, the news first."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from foreshock.api.diagnosis import DiagnosisCause
from foreshock.api.runs import ChangeRecord
from foreshock.diagnosis.beside_fall import ENTROPY_MOVED, FELL_AT_RESUME, GRADIENT_SPIKE
from foreshock.diagnosis.causes import (
    NOT_MEASURED,
    PLACE,
    REWARD_RULES,
    SET_APART,
    is_in_few_steps,
    most_steps,
    signal_of,
)
from foreshock.diagnosis.collapse import TRAILING_VALUES, floor_of
from foreshock.diagnosis.cut_responses import CUT_REWARDED, MANY_CUT, RESPONSES_CUT
from foreshock.diagnosis.episodes import MISMATCH, POLICY, episodes_of, family_of, is_of_mismatch
from foreshock.diagnosis.history import NEWEST_STEPS, WINDOW_STEPS, History, PastAlert, SteppedValues
from foreshock.diagnosis.mismatch_order import MISMATCH_LATER, order_in_words
from foreshock.diagnosis.odd_steps import ODD_STEPS
from foreshock.diagnosis.rate_change import RATE_ROSE
from foreshock.diagnosis.reward import level_after_fall
from foreshock.diagnosis.reward_outage import outage_of
from foreshock.diagnosis.source_rewards import MIX_CHANGED, ONE_SOURCE_FELL
from foreshock.diagnosis.tool_answers import TOOLS_CHANGED
from foreshock.diagnosis.weights import WEIGHTS_DIFFER
from foreshock.diagnosis.wording import as_clause, number, percent, plural, reward_number

MOST_CHARACTERS: Final = 160
"""Largest length of a headline; what does not fit stands below it."""

LEAST_REWARDS: Final = 15
"""Fewest rewards for the words "is near its best" in a headline: with fewer the detector finds no fall."""

NEVER_REWARDED: Final = "the reward is 0 in every step"

LITTLE_FALL: Final = 0.1
"""A reward that is at most this fraction of the way from its best to the floor "is near its best"."""

MUCH_LONGER: Final = 3.0
"""The factor from which a healthy headline names that lengths have grown or shrunk over the newest steps."""

_LENGTH_BEFORE: Final = "baseline_length"
"""The evidence of an alert on lengths that holds the length before them."""

MOST_TOLD: Final = 2
"""Largest number of causes in a headline."""

ENTROPY_RULE: Final = "entropy_rise"
ENTROPY_FALL: Final = "entropy_fall"
PERPLEXITY_RULE: Final = "perplexity_rise"

OF_FALL: Final = (
    RATE_ROSE, GRADIENT_SPIKE, FELL_AT_RESUME, TOOLS_CHANGED, MIX_CHANGED, ONE_SOURCE_FELL, RESPONSES_CUT,
    ENTROPY_MOVED,
)  # fmt: skip
"""Causes of a fall of the reward that are no mismatch; the first one found is told."""

SAID_BY: Final[Mapping[str, Collection[str]]] = {
    "log_probs_not_finite": ("placeholder_log_probs", "non_finite_log_probs"),
    "truncation_high": ("all_truncated", CUT_REWARDED),
}
"""Rule → the causes that say what its alert says, and more."""

_MOVES: Final[Mapping[str, str]] = {"rise": "rose", "fall": "fell"}

_FEW: Final = SET_APART - {"non_finite_log_probs"}

_NEAR_BEST: Final = re.compile(r"^the reward, (.+), is near its best.*")

_LAST_PARENTHESES: Final = re.compile(r" \([^()]*\)$")


def fitted(start: str, clauses: Sequence[str], last: int | None = None) -> str:
    """Return a headline of the clauses that fit, the first ones before the others, and that at `last` at the end."""
    room = MOST_CHARACTERS - len(start) - len(": .")
    told = [each for each in clauses if each]
    last = None if last is None or last >= len(told) else last
    order = [place for place in range(1, len(told)) if place != last] + ([] if last is None else [last])
    kept = {0: _shortened(told[0], room)}
    room -= len(kept[0])
    for place in order:
        # What stands in parentheses may be left out, that the data show it, a second cause, and what is added by "and".
        bare = told[place].removeprefix("the data show: ")
        one = told[place].partition("; ")[0]
        forms = [form for each in (told[place], bare, one) for form in (each, _LAST_PARENTHESES.sub("", each))]
        forms.append(one.removeprefix("the data show: ").partition(", and ")[0])
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


def told_titles(causes: Sequence[DiagnosisCause], said: Collection[str] = ()) -> list[str]:
    """Return the proven causes that a headline names, as clauses, without those that are already `said`."""
    shown = (each for each in causes if each.certainty == "shown" and each.title and each.name not in said)
    return [each.title for each in shown][:MOST_TOLD]


def of_mismatch(causes: Sequence[DiagnosisCause], said: Collection[str] = ()) -> str:
    """Return the clause of a headline on what makes the mismatch: proven causes, else the first possible one."""
    most = most_steps(causes)
    making = [each for each in causes if each.explains and each.title and each.name not in said]
    making = [each for each in making if not is_in_few_steps(each, most)]
    named = [each for each in making if each.name != PLACE]
    told = told_titles(named) or ([] if making[:1] == named[:1] else told_titles(making))
    if told:
        return f"the data show: {'; '.join(told)}"
    if not making:
        return ""
    place = next((f"; {each.title}" for each in making[1:] if each.name == PLACE), "")
    return f"probably {as_clause(making[0].title).removeprefix('it looks as if ')}{place}"


def possible_cause(causes: Sequence[DiagnosisCause], history: History) -> str:
    """Return the clause on a possible cause of a k3 above its range, if none is proven."""
    if not history.k3_now_of_others > history.healthy_end or any(each.certainty == "shown" for each in causes):
        return ""
    return of_mismatch(causes, NOT_MEASURED)


def clauses_of_alerts(
    first: PastAlert, grave: Sequence[PastAlert], history: History, causes: Sequence[DiagnosisCause]
) -> list[str]:
    """Return the clauses of a headline: the oldest open alert of the worst severity, a fall of the reward, shown
    causes."""
    said = SAID_BY.get(first.rule, ())
    fall = next((each for each in grave if each.rule in REWARD_RULES), None)
    # Single tokens that are left out make no reward fall.
    told = of_mismatch(causes, said if fall is None else {*said, *_FEW})
    never = NEVER_REWARDED if _is_never_rewarded(history) else ""
    # A cause or the reward says more than when the alert was found, which the event says too.
    earlier = None if fall is not first else changed_first(first, grave, history)
    story = next((each for each in episodes_of(grave) if first in each), [first])
    clauses = [_clause(first, history, "" if told or never or earlier else found_later(first, story))]
    if same := told_titles([each for each in causes if each.name in said]):
        clauses = same[:1]
    if told and (first.rule == WEIGHTS_DIFFER or is_over(first, history, causes)):
        # The notary names the engine and what it holds, single steps that are over their k3.
        clauses, told = [told.removeprefix("the data show: ")], ""
    if fall is not None and first.rule not in REWARD_RULES:
        clauses.append(_clause(fall, history, f" from step {fall.onset} on"))
    if fall is first and (signal := signal_of(first, causes)) is not None:
        clauses.append(f"the data show: {signal.title} since step {signal.evidence['first_step']}")
    if told:
        clauses.append(told)
    of_fall = [] if fall is None else [each.title for each in causes if each.name in OF_FALL and each.title][:1]
    clauses += of_fall
    if fall is not None and "before" in fall.evidence and family_of(first.rule, first.evidence) != MISMATCH:
        # After the mismatch, the dates of the two tell their order.
        clauses.append(order_in_words(fall.evidence))
    if earlier is not None:
        what, _, move = name_of(earlier).rpartition(" ")
        moved = f"the {what} {_MOVES[move]}" if move in _MOVES else f"{name_of(earlier)} came"
        clauses.append(f"{moved} first, from step {earlier.onset}")
    if fall is not None:
        clauses += [] if of_fall else of_lengths(history)
    elif said:
        clauses += told_titles([each for each in causes if not each.explains], said)
    clauses.append(never)
    if fall is None and not told and not never and _is_healthy_mismatch(grave, history):
        clauses.append(k3_clause(history))
    named = [each for each in (first, fall, earlier) if each is not None]
    others = sum(all(each not in episode for each in named) for episode in episodes_of(grave))
    if others > 0:
        clauses.append(plural(others, "more episode"))
    return clauses


def changed_first(fall: PastAlert, grave: Sequence[PastAlert], history: History) -> PastAlert | None:
    """Return the oldest alert on the policy or the gradient if it began before the reward fell.

    A perplexity that rises with the entropy is told as the entropy, which passes its larger factor later, maybe after
    the fall. That is no reason to call a run unhealthy by itself. Nor is an entropy that has fallen to a fifth: it is
    told if nothing else changed before.
    """
    policy = [each for each in grave if family_of(each.rule, each.evidence) == POLICY and each.onset < fall.onset]
    first = min(policy, key=lambda each: each.onset, default=None)
    if first is not None and first.rule != PERPLEXITY_RULE:
        return first
    if first is None and fall.evidence.get("first") not in MISMATCH_LATER:
        return None  # entropy falls as a run learns, and the mismatch may be the reason
    wanted = ENTROPY_FALL if first is None else ENTROPY_RULE
    infos = [each for each in history.alerts if each.is_open and each.rule == wanted]
    if earlier := next((each for each in infos if each.onset < fall.onset), None):
        return earlier
    return first if first is None or not infos else replace(first, rule=ENTROPY_RULE)


def _is_healthy_mismatch(grave: Sequence[PastAlert], history: History) -> bool:
    """Return whether k3 of the newest step is known and in its range, and no alert is of the mismatch."""
    is_measured = bool(history.k3.steps) and history.k3.steps[-1] == history.observed_step
    is_healthy = is_measured and history.judged_k3 <= history.healthy_end
    return is_healthy and not any(map(is_of_mismatch, grave))


def is_over(first: PastAlert, history: History, causes: Sequence[DiagnosisCause]) -> bool:
    """Return whether an open alert on the mismatch is of single bad steps, and k3 is healthy now."""
    is_healthy = is_of_mismatch(first) and history.judged_k3 <= history.healthy_end
    return is_healthy and bool(causes) and causes[0].name == ODD_STEPS


def _clause(alert: PastAlert, history: History, when: str) -> str:
    """Return the first sentence of an alert's reason as a clause with `when` it was.

    The clause of a fall gives the newest reward.
    """
    if alert.rule in REWARD_RULES and history.reward.values and "before" in alert.evidence:
        fell, now = _fall_in_words(alert.evidence, history.reward.newest(TRAILING_VALUES))
        return fell + when + now
    if is_of_mismatch(alert) and history.judged_k3 > history.healthy_end:
        levels = f"{number(history.judged_k3)}, healthy to {number(history.healthy_end)}"
        return f"the mismatch (k3) is {levels}{when}"
    first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])|; ", alert.why, maxsplit=1)[0].rstrip(".!? ")
    return as_clause(first_sentence) + when


def found_later(alert: PastAlert, episode: Sequence[PastAlert] = ()) -> str:
    """Return the step at which an alert was found if that is after its onset, for a clause; else "".

    With an `episode`, the step at which the first of its alerts of the same cause was found.
    """
    cause = alert.evidence.get("cause")
    alike = (each.step for each in episode if each.evidence.get("cause") == cause and each.severity != "info")
    found = min([alert.step, *alike])
    return f" (found at step {found})" if alert.onset < found else ""


def _fall_in_words(evidence: Mapping[str, Any], now: float) -> tuple[str, str]:
    """Return clauses on a fall and on the reward now; the second is empty unless a part of the fall is recovered."""
    level, is_recovering = level_after_fall(evidence, now)
    fell = f"the reward fell from {reward_number(float(evidence['before']))} to {reward_number(level)}"
    return fell, f" and is {reward_number(now)} now" if is_recovering else ""


def name_of(alert: PastAlert) -> str:
    """Return the name of an alert's rule in words."""
    return alert.rule.replace("_", " ")


def k3_clause(history: History) -> str:
    """Return a clause on k3 of the newest measured steps; at lag 0 if lags are mixed."""
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


def _is_never_rewarded(history: History) -> bool:
    values = history.reward.values
    return len(values) >= LEAST_REWARDS and min(values) == max(values) == 0.0


def reward_clause(history: History, alerts: Sequence[PastAlert]) -> str:
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


def of_lengths(history: History) -> list[str]:
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
