"""Severities are ordered by how severe they are, not by the alphabet."""

from __future__ import annotations

from typing import get_args

from foreshock.severity import SEVERITIES, Severity, severity_rank


def test_the_most_severe_comes_first() -> None:
    assert sorted(["info", "warning", "critical", "warning"], key=severity_rank) == [
        "critical", "warning", "warning", "info",
    ]  # fmt: skip


def test_every_severity_has_a_rank_and_an_unknown_one_comes_last() -> None:
    assert set(SEVERITIES) == set(get_args(Severity))
    assert severity_rank("urgent") > max(map(severity_rank, SEVERITIES))
