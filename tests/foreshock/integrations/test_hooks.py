"""Observers see calls and results, and never change or break what they observe."""

import logging
from typing import Any

import pytest

from foreshock.client.reporting import LogOnce
from foreshock.integrations.hooks import is_observed, observe


class Trainer:
    """An object of a framework."""

    def score(self, value: int, *, factor: int = 1) -> int:
        """Return a product; raise ValueError for a negative value."""
        if value < 0:
            raise ValueError("negative")
        return value * factor


@pytest.fixture
def log() -> LogOnce:
    """A log of this test alone."""
    return LogOnce("foreshock.test_hooks")


def test_observer_sees_arguments_and_result(log: LogOnce) -> None:
    trainer, seen = Trainer(), []
    assert observe(trainer, "score", log, after=lambda *call: seen.append(call))
    assert trainer.score(3, factor=2) == 6
    assert seen == [((3,), {"factor": 2}, 6)]


def test_second_observer_of_a_method_changes_nothing(log: LogOnce) -> None:
    trainer, seen = Trainer(), []
    for _ in range(2):
        assert observe(trainer, "score", log, after=lambda *call: seen.append(call))
    trainer.score(1)
    assert len(seen) == 1
    assert is_observed(trainer, "score")
    assert not is_observed(Trainer(), "score")


def test_missing_method_is_reported(log: LogOnce) -> None:
    assert not observe(Trainer(), "absent", log, after=lambda *_: None)


def test_error_of_an_observer_is_logged_once(log: LogOnce, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("changed")

    trainer = Trainer()
    observe(trainer, "score", log, before=fail, after=fail)
    with caplog.at_level(logging.ERROR):
        assert [trainer.score(value) for value in (1, 2)] == [1, 2]
    assert len(caplog.records) == 1
    assert "training continues" in caplog.text


def test_error_of_the_framework_is_not_hidden(log: LogOnce) -> None:
    trainer = Trainer()
    observe(trainer, "score", log, after=lambda *_: None)
    with pytest.raises(ValueError, match="negative"):
        trainer.score(-1)
