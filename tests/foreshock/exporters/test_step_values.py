"""Values of steps from measurements, alerts and advice."""

from __future__ import annotations

from typing import Any

from foreshock.api.watch import AlertRecord
from foreshock.client.columns import Measurements
from foreshock.client.columns import measurements as parse_measurements
from foreshock.exporters.step_values import step_values
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.length_decay import Point


def alert(step: int, **fields: Any) -> AlertRecord:
    values: dict[str, Any] = {
        "id": "a", "attempt": 1, "rule": "k3_high", "severity": "warning", "state": "open", "value": 1.0,
        "threshold": 0.5, "why": "", "what_to_do": "", "changed_by": "detector", "opened_at_us": 1, "changed_at_us": 1,
    }  # fmt: skip
    return AlertRecord(step=step, **(values | fields))


def measured(*incomplete: dict[str, int], **columns: list[Any]) -> Measurements:
    return parse_measurements({"columns": columns, "incomplete_steps": incomplete})


def test_rows_of_both_comparisons_join_in_their_step() -> None:
    read = measured(step=[1, 2, 1], k3_kl=[0.1, None, None], reward_mean=[None, None, 0.5], other=[1, 1, 1])
    first, second = step_values(read, [], None, ("k3_kl", "reward_mean"), set())
    assert (first.step, first.values["k3_kl"], first.values["reward_mean"]) == (1, 0.1, 0.5)
    assert "k3_kl" not in second.values
    assert "other" not in first.values


def test_an_alert_counts_from_its_step_until_it_clears() -> None:
    read = measured(step=[1, 2, 3, 4])
    rules: set[str] = set()
    steps = step_values(read, [alert(2, state="resolved", cleared_step=4)], None, (), rules)
    assert [each.values["alerts/warning"] for each in steps] == [0, 1, 1, 0]
    assert [each.values["alert/k3_high"] for each in steps] == [0, 1, 1, 0]
    (later,) = step_values(measured(step=[5]), [], None, (), rules)
    assert later.values["alert/k3_high"] == 0, "a rule that fired once keeps its series"


def test_an_alert_that_a_person_resolved_does_not_fire() -> None:
    (step,) = step_values(measured(step=[3]), [alert(2, state="resolved")], None, (), set())
    assert step.values["alerts/warning"] == 0


def test_an_incomplete_step_shows_its_missing_shards() -> None:
    read = measured({"attempt": 1, "step": 2, "shards": 1, "expected_shards": 4}, step=[1, 2])
    assert [each.values["missing_shards"] for each in step_values(read, [], None, (), set())] == [0, 3]


def test_advice_gives_the_scale_of_each_step_in_either_mode() -> None:
    advice = Advice(run="run-1", attempt=1, revision=1, mode="shadow", points=(Point(2, 1),))
    first, second = step_values(measured(step=[1, 2]), [], advice, (), set())
    assert (first.values["lr_scale"], first.values["lr_scale_advised"]) == (1.0, 1.0)
    assert (second.values["lr_scale"], second.values["lr_scale_advised"]) == (1.0, 0.5)
