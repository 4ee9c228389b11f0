"""What is said of evidence that cannot be read."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from foreshock_service.runs.judging import LintPart, judge_step, lint_shard
from tests.service.sending import make_batch


def test_unreadable_evidence_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    part = LintPart.of(lint_shard(make_batch(1)))
    damaged = replace(part, evidence=part.evidence[: len(part.evidence) // 2])
    with caplog.at_level(logging.WARNING):
        verdict = judge_step(1, 1, [damaged, part, damaged])
    assert verdict is not None
    assert verdict.report.shards == 1
    (message,) = caplog.messages
    assert "2 of 3 shards" in message
    assert "`foreshock remeasure`" in message
    assert judge_step(1, 1, [damaged]) is None
