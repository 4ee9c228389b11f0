"""The presenter of a run's changes: of the setup, and announced ones."""

from __future__ import annotations

from foreshock.changes import ChangeKind
from foreshock_service.present.pages.figures.changes import Mark
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.runs.changes.schemas import ChangeRead, DifferenceRead
from foreshock_service.runs.changes.service import newest_changes

MOST_CHANGES = 200
_MOST_DIFFERENCES = 3
_LONGEST_VALUE = 40
_NAMES: dict[ChangeKind, str] = {
    "length_cap": "length cap",
    "curriculum": "curriculum",
    "data_mixture": "data mixture",
    "other": "announced change",
}


def marks_of(viewing: Viewing, run_id: str) -> list[Mark]:
    """Return the newest changes of a run, by step."""
    return [
        Mark(change.step, change_in_words(change)) for change in newest_changes(viewing.session, run_id, MOST_CHANGES)
    ]


def changes_in_words(viewing: Viewing, run_id: str) -> list[str]:
    """Return a sentence for each of the newest changes, the newest first."""
    return [f"step {mark.step}, {mark.text}" for mark in reversed(marks_of(viewing, run_id))]


def change_in_words(change: ChangeRead) -> str:
    """Return what changed, in a few words."""
    if change.kind == "setup":
        named = [_difference(each) for each in change.differences[:_MOST_DIFFERENCES]]
        others = len(change.differences) - len(named)
        return ", ".join(named) + (f" and {others} more fields" if others else "")
    text = _NAMES[change.kind]
    if change.before is not None or change.after is not None:
        text += f" {_value(change.before)} → {_value(change.after)}"
    return text if change.note is None else f"{text} ({change.note})"


def _difference(difference: DifferenceRead) -> str:
    before, after = (" and ".join(_value(each) for each in side) for side in (difference.before, difference.after))
    return f"{difference.name} {before} → {after}"


def _value(value: object) -> str:
    text = "?" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
