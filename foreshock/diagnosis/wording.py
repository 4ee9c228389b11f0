"""Format numbers, intervals and clauses for sentences."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten

from foreshock.interval_names import RANGE, between_ends


def number(value: float, digits: int = 2) -> str:
    """Return a number with `digits` significant digits, such as "1.8e-2" or "0.52"; "unknown" for NaN."""
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 0.1 <= abs(value) < 1e4:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{decimals}f}".replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return mantissa.replace("-", "−") + f"e{int(exponent)}"


def reward_number(value: float) -> str:
    """Return a reward as people write it: 0.042, not 4.2e-2."""
    return f"{value:.2g}".replace("-", "−") if 1e-3 <= abs(value) < 0.1 else number(value)


def percent(share: float) -> str:
    """Return a share in whole percents, with a real minus sign and without a negative zero."""
    if math.isnan(share):
        return "unknown"
    text = f"{100 * share:.0f}"
    return ("0" if text == "-0" else text.replace("-", "−")) + " %"


def interval_text(low: float, high: float) -> str:
    """Return an interval as words; "no range" if it is unknown."""
    if math.isnan(low) or math.isnan(high):
        return "no range"
    return f"{RANGE} {between_ends(number(low), number(high))}"


def interval_of_share(low: float, high: float) -> str:
    """Return the interval of a share in percents, see `interval_text`."""
    if math.isnan(low) or math.isnan(high):
        return "no range"
    return f"{RANGE} {between_ends(percent(low), percent(high))}"


def as_clause(sentence: str) -> str:
    """Return a sentence as a clause, which starts in lower case: "the baseline", but "KL"."""
    is_word = len(sentence) > 1 and sentence[1].islower()
    return sentence[0].lower() + sentence[1:] if is_word else sentence


def as_sentence(clause: str) -> str:
    """Return a clause as a sentence of its own: with a capital, a full stop, and its other letters as they are."""
    first = clause[:1].upper() if clause[:1].isascii() else clause[:1]
    return f"{first}{clause[1:].rstrip('.')}."


MOST_RANKS = 8
"""Ranks that a sentence names."""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the ranks of missing shards: "rank 3", "ranks 2 and 3", "ranks 1, 2, …, 8 and 503 more"."""
    named = [str(rank) for rank in ranks[:MOST_RANKS]]
    more = len(ranks) - len(named)
    last = f"{more} more" if more else named.pop()
    return f"rank{'' if len(ranks) == 1 else 's'} " + (f"{', '.join(named)} and {last}" if named else last)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 prompt", "8 prompts"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


_SHOWN_CHARACTERS = 300


def names_read(where: str, read: Mapping[str, str], unread: Iterable[str]) -> list[str]:
    """Return lines that name the scalars that were read from a file, as which quantity, and those that were not."""
    as_quantities = [name if name == each else f"{name} as {each}" for each, name in read.items()]
    lines = [f"{where}: read {', '.join(as_quantities) or 'nothing that is watched'}"]
    others = shorten(", ".join(unread), _SHOWN_CHARACTERS, placeholder=" …")
    return [*lines, f"  not watched: {others}"] if others else lines
