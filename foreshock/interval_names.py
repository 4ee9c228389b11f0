"""The names of intervals. Sentences, pages, the report and the API use these words.

No interval is called a 95 % interval. The range contains the mean of the run's prompts nearly that often if prompts are
alike. If one prompt in 50 has ten times the |d|, it contains the mean in only 16 % of the batches of 8 prompts and 43 %
of those of 32 (`benchmarks/coverage.py`). No number of a batch distinguishes these cases: the tail shape k̂ is low in
exactly the batches that lack the heavy prompt.
"""

from collections.abc import Callable

RANGE = "range over the prompts"
RANGE_NOTE = (
    f"A {RANGE} resamples the prompts of the batch. What is too rare to be among them is not in it: it is no bound on "
    "the mean of the run."
)

UNTOLD = "cannot tell"

_WIDEST = 100.0

_STILL_TELLS = 0.01
"""An upper end below this shows that a k3 is not critical, however wide the range is."""


def ends_in_words(mean: float, low: float, high: float, number: Callable[[float], str], between: str = " to ") -> str:
    """Return the ends of a range of a mean that is never negative; UNTOLD if it ends beyond 100 times the mean.

    One heavy prompt among few gives a range such as 0 … 2639 for a k3 of 1, on which no user can act.
    """
    return UNTOLD if high > max(_WIDEST * mean, _STILL_TELLS) else between_ends(number(low), number(high), between)


def between_ends(low: str, high: str, between: str = " to ") -> str:
    """Return the two ends of a range as text, or one end if both have the same text."""
    return low if low == high else f"{low}{between}{high}"


def range_in_words(mean: float, low: float, high: float, number: Callable[[float], str]) -> str:
    """Return a range with its name, see `ends_in_words`."""
    ends = ends_in_words(mean, low, high, number)
    return f"{RANGE}: {ends}" if ends == UNTOLD else f"{RANGE} {ends}"
