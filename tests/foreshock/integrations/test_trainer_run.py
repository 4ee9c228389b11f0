"""The wait of a resumed run for its first scale."""

from typing import Any

import pytest

from foreshock.client.reporting import LogOnce
from foreshock.integrations.trainer_run import await_first_advice
from foreshock.learning_rate.advice import Advice


class Feed:
    """A feed whose answer arrives after some looks at it."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    @property
    def advice(self) -> Advice | None:
        self._looks -= 1
        return None if self._looks >= 0 else Advice(run="run-1", attempt=2, revision=1)


def test_answer_that_arrives_ends_the_wait_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    feed: Any = Feed(looks=3)
    await_first_advice(feed, LogOnce("foreshock.test_first_advice"), 60.0)
    assert not caplog.records


def test_service_that_stays_away_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    feed: Any = Feed(looks=1_000_000)
    log = LogOnce("foreshock.test_first_advice")
    for _ in range(2):
        await_first_advice(feed, log, 0.06)
    assert len(caplog.records) == 1
    assert "did not answer within 0.06 s of the resume: the learning rate is not scaled until it does" in caplog.text
