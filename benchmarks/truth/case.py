"""A case with a known truth, what the product shows for it, and whether that is true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from benchmarks.truth.bench import Bench


# Findings that name no fault: they describe the size or place of the mismatch, what to declare, or the rewards.
_OBSERVATIONS = {
    "advantages_not_of_group",
    "k3_per_entropy",
    "lag_unknown",
    "mismatch_after_id",
    "mismatch_by_place",
    "mismatch_everywhere",
    "no_reward_spread",
    "sampling_not_declared",
    "source_not_rewarded",
}


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence that the product shows. `kind`: kind of a conclusion, cause of the doctor, or check of the lint."""

    kind: str
    text: str
    names_cause: bool
    link: str | None = None

    @classmethod
    def of_conclusion(cls, value: Mapping[str, Any]) -> Self:
        """Read an item of `conclusions` of `GET …/attribution`."""
        return cls(str(value["kind"]), str(value["sentence"]), bool(value["names_cause"]), value.get("link"))

    @classmethod
    def of_finding(cls, value: Mapping[str, Any]) -> Self:
        """Read a finding of `GET …/doctor`."""
        return cls(str(value["cause"]), str(value["sentence"]), value["kind"] == "cause")

    @classmethod
    def of_lint(cls, value: Mapping[str, Any]) -> Self:
        """Read an item of `warnings` of `GET …/lint`; all of them name a fault except `_OBSERVATIONS`."""
        name = str(value["name"])
        return cls(name, f"{value['title']}: {value['seen']}", names_cause=name not in _OBSERVATIONS)

    def names(self, cause: str) -> bool:
        """Return True if the kind is `cause` or the text contains it, ignoring case."""
        return self.kind == cause or cause.casefold() in self.text.casefold()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is shown: conclusions, then findings of the lint; and the report's verdict on the run."""

    sentences: tuple[Sentence, ...]
    run_verdict: str = "unknown"


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    `expected_cause` is the true cause, as in `Sentence.names`: the kind of a conclusion, the name of a check of the
    lint, or words of the sentence; None if nothing is wrong. `sufficient`: the data suffice to name it. `also_true` are
    other true causes that may be named too, such as a consequence of the first. `not_healthy`: the diagnosis must not
    call the run healthy.
    """

    name: str
    expected_cause: str | None
    sufficient: bool
    run: Callable[[Bench], Outcome]
    also_true: tuple[str, ...] = ()
    not_healthy: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement on a case: `shown` is the sentence that decided it."""

    case: Case
    shown: str
    false_cause: bool
    named: bool
    called_healthy: bool = False

    @property
    def true(self) -> bool:
        """True if no false cause is named, the true one is named if the data suffice, and no faulty run is healthy."""
        return not self.false_cause and not self.called_healthy and (self.named or not self.must_be_named)

    @property
    def must_be_named(self) -> bool:
        """True if there is a cause and the data suffice to name it."""
        return self.case.expected_cause is not None and self.case.sufficient


def judge(case: Case, outcome: Outcome) -> Verdict:
    """Return the verdict on what was shown for `case`."""
    true_causes = tuple(cause for cause in (case.expected_cause, *case.also_true) if cause is not None)
    false = [
        each for each in outcome.sentences if each.names_cause and not any(each.names(cause) for cause in true_causes)
    ]
    named = [each for each in outcome.sentences if case.expected_cause and each.names(case.expected_cause)]
    decisive = next(iter([*false, *named, *outcome.sentences]), None)
    healthy = outcome.run_verdict.startswith("healthy")
    return Verdict(
        case,
        decisive.text if decisive else f"nothing; the run is {outcome.run_verdict}",
        false_cause=bool(false),
        named=bool(named),
        called_healthy=case.not_healthy and healthy,
    )
