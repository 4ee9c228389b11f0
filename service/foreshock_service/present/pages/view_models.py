"""Small view models that several templates share. The view model of a whole page is beside its presenter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Label:
    """A badge: a word and its tone. The word alone must be enough, without the colour."""

    text: str
    tone: Tone = ""
    live: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as ISO 8601 for machines and as text for people."""

    machine: str
    person: str


@dataclass(frozen=True, slots=True)
class Visitor:
    """The scopes of the person who reads the page; they determine which forms the page has."""

    signed_in: bool
    may_answer_alerts: bool
    may_operate: bool
    csrf_token: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several figures for the same place."""

    text: str
    address: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A place for a figure. The browser fetches the specification from `address`, or from that of another choice."""

    id: str
    title: str
    address: str
    wide: bool = False
    choices: Sequence[Choice] = ()
    over_steps: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A number in a table, the tone of its range, and its interval if it has one."""

    text: str
    tone: Tone = ""
    interval: str | None = None
