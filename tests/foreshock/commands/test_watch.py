"""What `foreshock watch` prints of a step, and what is coloured."""

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foreshock.api.diagnosis import Diagnosis
from foreshock.api.runs import RunRecord
from foreshock.client.columns import Measurements
from foreshock.client.columns import measurements as parse_measurements
from foreshock.client.reader import Reader
from foreshock.commands.text import Paint
from foreshock.commands.watch import _Watch
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT

CRITICAL = "\x1b[31;1m"
FRESH = {"k3_kl": 5e-4, "tokens": 1000.0, "tokens_lag_0": 1000.0, "k3_kl_lag_0": 5e-4}
# Three quarters of the tokens are at lag 8.
MIXED = {"k3_kl": 0.066, "tokens": 1000.0, "tokens_lag_0": 250.0, "tokens_lag_5_8": 750.0, "k3_kl_lag_5_8": 0.088}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reading(values: dict[str, dict[int, dict[str, float]]], headline: str = "Healthy.") -> Reader:
    """Return a reader of these values, by comparison and step."""

    def measurements(_: str, *, measures: Any, comparisons: list[str], from_step: int) -> Measurements:
        rows = {step: row for step, row in values[comparisons[0]].items() if step >= from_step}
        columns = {name: [row.get(name) for row in rows.values()] for name in measures}
        return parse_measurements({"columns": {"step": [*rows], **columns}, "incomplete_steps": []})

    def scalars(_: str, *, names: Any, from_step: int) -> SimpleNamespace:
        return SimpleNamespace(columns={"name": [], "source": [], "step": [], "value": []})

    found = Diagnosis(verdict="healthy", headline=headline)
    reader = SimpleNamespace(
        measurements=measurements, scalars=scalars, diagnosis=lambda _: found, alerts=lambda _: [],
        attempts=lambda _: [],
    )  # fmt: skip
    return cast(Reader, reader)


RUN = cast(RunRecord, SimpleNamespace(id="run_1", scalar_names=None, last_step=100))


def line_of(values: dict[str, float], capsys: pytest.CaptureFixture[str], lag: float = 0.0) -> str:
    reader = reading({STEP_ROW: {7: {"lag_mean": lag}}, TRAINER_ROLLOUT: {7: values}})
    _Watch(reader, "run_1", Paint(Terminal()), None, 7, 7).print_new(RUN, is_last=True)
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 7"))


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_k3_is_coloured_by_the_tokens_at_lag_zero(capsys: pytest.CaptureFixture[str]) -> None:
    fresh = line_of(FRESH, capsys)
    assert "k3 \x1b[32m5.00e-4" in fresh
    assert "lag 0" not in fresh
    mixed = line_of(MIXED | {"k3_kl_lag_0": 5e-4}, capsys, 6.0)
    assert "k3 0.0660   lag 0 \x1b[32m5.00e-4" in mixed
    assert f"lag 0 {CRITICAL}0.0500" in line_of(MIXED | {"k3_kl_lag_0": 0.05}, capsys, 6.0)


def test_k3_of_a_step_without_enough_tokens_at_lag_zero_has_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    few = MIXED | {"k3_kl_lag_0": 5e-4, "tokens_lag_0": 20.0}
    for values, lag in ((few, 6.0), ({"k3_kl": 0.066, "tokens": 1000.0}, 6.0)):
        line = line_of(values, capsys, lag)
        assert "k3 0.0660 " in line
        assert "\x1b[" not in line


def test_a_step_is_printed_with_the_reward_that_is_reported_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    rewards, newest = {5: 0.5}, 7

    def look(*, is_last: bool = False) -> list[str]:
        rows = {step: {"reward_mean": rewards[step]} if step in rewards else {} for step in range(newest + 1)}
        watch.reader = reading({STEP_ROW: rows, TRAINER_ROLLOUT: {}})
        watch.print_new(RUN, is_last=is_last)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        return [f"{line.split()[1]} {line.partition('reward ')[2].split()[0]}" for line in lines]

    watch = _Watch(reading({}), "run_1", Paint(Terminal()), None, 5, 5)
    # Step 6 has no reward, as there is a later one; that of step 7 may come.
    assert look() == ["5 0.500", "6 –"]
    # It did not come until the next look, and the step before has none.
    assert look() == ["7 –"]
    newest, rewards[8] = 8, 0.75
    assert look() == ["8 0.750"]
    # The step before has a reward: that of step 9 is awaited until step 10 closes, or until the run ends.
    newest = 9
    assert look() == look() == look() == []
    rewards[9] = 1.0
    assert look() == ["9 1.00"]
    newest = 10
    assert look() == look() == []
    newest = 11
    assert look() == ["10 –"]
    assert look(is_last=True) == ["11 –"]


def test_the_headline_is_repeated_only_if_it_says_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    said = [
        "Healthy: k3 is 2.1e-5; the reward, 0.97, is near its best.",
        "Healthy: k3 is 1.9e-4; the reward, 1, is near its best.",
        "Warning since step 12: k3 has risen.",
    ]
    shown = []
    watched = _Watch(reading({}), "run_1", Paint(io.StringIO()), None, 7, 7)
    for headline in said:
        watched.reader = reading({}, headline)
        watched._print_diagnosis()
        shown.append(capsys.readouterr().out.strip())
    assert shown == [said[0], "", said[2]]
