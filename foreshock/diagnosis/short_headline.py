"""The diagnosis in at most 78 characters, for the rows of lists: what has happened to the reward, then the mismatch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from foreshock.api.diagnosis import Verdict
from foreshock.diagnosis.collapse import TRAILING_VALUES
from foreshock.diagnosis.history import History, PastAlert
from foreshock.diagnosis.reward import COLLAPSE_RULE, FALL_RULE, level_after_fall
from foreshock.diagnosis.wording import as_sentence, number, reward_number

MOST_CHARACTERS: Final = 78
"""`foreshock runs` indents it by two, in 80 columns."""


def short_of(verdict: Verdict, headline: str, grave: Sequence[PastAlert], cause: str, history: History) -> str:
    """Return the verdict and its news in at most 78 characters.

    `grave` are the open alerts above info, the one that the headline tells first; `cause` is its clause on what makes
    the mismatch, or "".
    """
    if verdict == "healthy":
        inside = not history.newest_lags.is_mixed and history.k3_now <= history.healthy_end
        k3 = history.k3_now if inside else history.judged_k3
        parts = [f"k3 {number(k3)}" if math.isfinite(k3) else ""]
        parts.append(f"reward {reward_number(history.reward.newest())}" if history.reward.values else "")
        _, _, objection = headline.rstrip(".").partition("; but ")
        return _joined("Healthy: ", [", ".join(filter(None, parts)), objection and f"but {objection}"], headline)
    if not grave:
        return _first_clauses(headline)
    fall = next((each for each in grave if each.rule in (COLLAPSE_RULE, FALL_RULE)), None)
    if fall is not None and "before" in fall.evidence:
        now, _ = level_after_fall(fall.evidence, history.reward.newest(TRAILING_VALUES))
        word = "Collapsed" if fall.rule == COLLAPSE_RULE else "Reward falls"
        news = f"reward {reward_number(float(fall.evidence['before']))} → {reward_number(now)} since step {fall.onset}"
        return _joined(f"{word}: ", [news, _growth(fall), cause], headline)
    first = grave[0]
    if first.evidence.get("cause") == "mismatch" and history.judged_k3 <= history.healthy_end and cause:
        return _joined("Mismatch: ", [cause.removeprefix("the data show: ")], headline)
    if first.evidence.get("cause") == "mismatch" and math.isfinite(history.judged_k3):
        news = f"k3 {number(history.judged_k3)}, healthy to {number(history.healthy_end)}, since step {first.onset}"
        return _joined("Mismatch: ", [news, cause], headline)
    return _first_clauses(headline)


def _growth(fall: PastAlert) -> str:
    """Return how much the mismatch had grown before a fall; "" if it did not rise first."""
    baseline, after = (float(fall.evidence.get(name, math.nan)) for name in ("k3_baseline", "k3_after"))
    if fall.evidence.get("first") != "mismatch" or not after > baseline > 0.0:
        return ""
    return f"k3 had grown × {number(after / baseline)} since {fall.evidence['k3_onset_step']}"


def _first_clauses(headline: str) -> str:
    """Return the clauses of a headline that fit, the first one up to its last part that does, without parentheses."""
    start, _, rest = re.sub(r" \([^)]*\)", "", headline).partition(": ")
    first, *others = rest.rstrip(".").split("; ")
    while len(start) + len(first) + len(": .") > MOST_CHARACTERS and ", " in first:
        first = first.rpartition(", ")[0]
    return _joined(f"{start}: ", [first, *others], headline)


def _joined(start: str, parts: Sequence[str], headline: str) -> str:
    """Return the parts that fit, as a sentence; the headline, cut, if not even the first one is known."""
    found = ""
    for part in filter(None, parts):
        longer = f"{found}; {part}" if found else part
        if len(start) + len(longer) < MOST_CHARACTERS:
            found = longer
    return as_sentence(start + found) if found else _cut(headline)


def _cut(text: str) -> str:
    """Return the text up to its last whole word that fits, with an ellipsis if something is cut."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS - 1].rsplit(' ', 1)[0].rstrip(',;:')}…"
