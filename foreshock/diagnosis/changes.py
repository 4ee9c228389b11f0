"""Changes of a run in words: announced by its trainer, or of the setup that its rollouts name."""

from __future__ import annotations

from typing import Final

from foreshock.api.runs import ChangeRecord, DifferenceRecord
from foreshock.changes import ChangeKind

_MOST_DIFFERENCES: Final = 3
_LONGEST_VALUE: Final = 40
_NAMES: Final[dict[ChangeKind, str]] = {
    "length_cap": "length cap",
    "curriculum": "curriculum",
    "data_mixture": "data mixture",
    "other": "announced change",
}


def change_in_words(change: ChangeRecord) -> str:
    """Return what changed, in a few words."""
    if change.kind == "setup":
        named = [_difference(each) for each in change.differences[:_MOST_DIFFERENCES]]
        others = len(change.differences) - len(named)
        return ", ".join(named) + (f" and {others} more fields" if others else "")
    text = _NAMES[change.kind]
    if change.before is not None or change.after is not None:
        text += f" {_value(change.before)} → {_value(change.after)}"
    return text if change.note is None else f"{text} ({change.note})"


def _difference(difference: DifferenceRecord) -> str:
    before, after = (" and ".join(_value(each) for each in side) for side in (difference.before, difference.after))
    return f"{difference.name} {before} → {after}"


def _value(value: object) -> str:
    text = "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
