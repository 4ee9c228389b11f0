"""The diagnosis of a run: the one answer to "how is it", which the service stores and every surface renders."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Final, Literal

from foreshock.api.records import Record, from_attributes, parse
from foreshock.healthy_ranges import Verdict as Verdict
from foreshock.severity import Severity

VERDICTS: Final[tuple[Verdict, ...]] = ("critical", "warning", "healthy", "unknown")
CauseSource = Literal["lint", "probe", "detector", "doctor", "notary"]
Certainty = Literal["shown", "possible"]
"""`shown`: the data prove it. `possible`: it "looks like" it, and yields to a probe."""


class DiagnosisEvent(Record):
    """An alert in the order of what happened: `onset` is where it began, `step` where it was found."""

    step: int
    onset: int
    rule: str
    severity: Severity
    sentence: str
    is_open: Annotated[bool, "open or acknowledged; else it is over"]
    is_told: Annotated[bool | None, "whether lists name it; else it is over, or told by another one; null: if open"] = (
        None
    )

    @property
    def is_named(self) -> bool:
        """Whether lists name it; an event of an older service if it is open."""
        return self.is_open if self.is_told is None else self.is_told


class DiagnosisCause(Record):
    """A cause that the data name."""

    name: str
    sentence: str
    source: CauseSource
    certainty: Certainty = "shown"
    title: Annotated[str, "the cause as a clause of the headline"] = ""
    what_to_do: str = ""
    explains: Annotated[bool, "whether it makes π and μ differ; else it is another fault, or follows from it"] = True
    evidence: Mapping[str, Any] = field(default_factory=dict)


class MissingData(Record):
    """Data that the diagnosis lacks, and what to do about it."""

    sentence: str
    what_to_do: str = ""


class RunVerdict(Record):
    """The diagnosis in one sentence, as lists of runs have it."""

    verdict: Verdict
    since: Annotated[int | None, "at which the headline's first episode began; null: healthy or unknown"] = None
    headline: Annotated[str, "one sentence, the same on every surface"]
    short: Annotated[str, "the news in at most 80 characters, for rows of lists"] = ""
    observed_step: Annotated[int | None, "the newest closed step"] = None
    revision: Annotated[int, "grows with each change of the content"] = 0


class Diagnosis(RunVerdict):
    """The diagnosis of a run."""

    events: Annotated[tuple[DiagnosisEvent, ...], "what happened first comes first"] = ()
    causes: tuple[DiagnosisCause, ...] = ()
    next_steps: tuple[str, ...] = ()
    missing: tuple[MissingData, ...] = ()
    computed_at_us: int = 0

    def parts(self) -> dict[str, list[str]]:
        """Return the sentences that pages and reports show below the headline, by title; empty parts are left out."""
        parts = {
            "What happened, in order": [each.sentence for each in self.events if each.is_named],
            "Causes": [each.sentence + ("" if each.certainty == "shown" else " (possible)") for each in self.causes],
            "What to do": list(self.next_steps),
            "Missing": [f"{_capital(each.sentence)}." for each in self.missing],
        }
        return {title: sentences for title, sentences in parts.items() if sentences}

    @property
    def summary(self) -> RunVerdict:
        """The one sentence, for lists."""
        return from_attributes(RunVerdict, self)


def _capital(sentence: str) -> str:
    # A symbol keeps its letter: k3, μ.
    return sentence[:1].upper() + sentence[1:] if sentence[:1].isascii() and sentence[1:2].isalpha() else sentence


def diagnosis_of(value: Mapping[str, Any]) -> Diagnosis:
    """Parse a diagnosis; a verdict that this release does not know is "unknown"."""
    verdict = value.get("verdict")
    return parse(Diagnosis, {**value, "verdict": verdict if verdict in VERDICTS else "unknown"})
