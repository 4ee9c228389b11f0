"""Totals of kills and cases; kept in files, so that they add up over several calls and releases."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from benchmarks.faults.verify import Findings


@cache
def revision() -> str:
    """Return the revision of the sources, with `+` if they were changed since; `unknown` outside of a repository."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


@dataclass(slots=True)
class Totals:
    """Kills by point and by revision, and what was found; `save` and `load` keep them between calls."""

    kills: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    runs: int = 0
    decoder_kills: int = 0
    revisions: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Return the number of kills of the service."""
        return sum(self.kills.values())

    def count_kill(self, reason: str) -> None:
        """Count a kill of this revision."""
        self.kills[reason] += 1
        self.revisions[revision()] += 1

    def save(self, path: Path) -> None:
        """Write the totals as JSON."""
        values = {
            "kills": self.kills,
            "revisions": self.revisions,
            "counts": self.findings.counts,
            "problems": self.findings.problems,
            "runs": self.runs,
            "decoder_kills": self.decoder_kills,
        }
        new = path.with_suffix(".new")
        new.write_text(json.dumps(values, indent=1))
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Totals:
        """Read saved totals; empty ones without a file."""
        if not path.exists():
            return cls()
        values = json.loads(path.read_text())
        findings = Findings(Counter(values["counts"]), list(values["problems"]))
        revisions = Counter(values.get("revisions", {}))
        return cls(Counter(values["kills"]), findings, values["runs"], values["decoder_kills"], revisions)


@dataclass(slots=True)
class CaseTotals:
    """How often a case was run, at which revisions, and what was found."""

    runs: int = 0
    revisions: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def note_case(path: Path, name: str, answers: Counter[str], problems: list[str]) -> None:
    """Add a case that was run to those of earlier calls."""
    cases = json.loads(path.read_text()) if path.exists() else {}
    before = cases.get(name)
    case = CaseTotals() if before is None else CaseTotals(**before)
    case.revisions, case.answers = Counter(case.revisions), Counter(case.answers) + answers
    case.revisions[revision()] += 1
    case.runs += 1
    case.problems += problems
    # Not `asdict`, which makes a Counter of pairs out of a Counter.
    cases[name] = {each.name: getattr(case, each.name) for each in fields(case)}
    path.write_text(json.dumps(cases, indent=1))
