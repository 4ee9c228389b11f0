"""Suggestions for misspelled names, in every error that lists what is known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_SIMILARITY = 0.6


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'name'?` for the most similar known name, "" if none is similar."""
    found = nearest(given, known)
    return f", did you mean {found!r}?" if found is not None else ""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name, None if none is similar."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given.lower(), names, n=1, cutoff=_SIMILARITY)
    return names[found[0]] if found else None
