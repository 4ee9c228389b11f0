"""Policies of automatic probes: which steps they choose, once each, and with which sample."""

from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.rollouts.sampling import select_rollouts
from foreshock.scorers import default_scorers
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.session import Database
from foreshock_service.replay.probes.policies import UNFINISHED_AT_ONCE, make_automatic_probes
from tests.service.advancing import close_overdue
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import add_alert
from tests.service.working import announce_checkpoint, run_to_probe, take_lease, work_off


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    return run_to_probe(http, 2, 3, 5, 14, 21)


def log_steps(sender: Sender, *steps: int) -> None:
    """Log closed steps of 12 rollouts with their checkpoints."""
    for step in steps:
        sender.put_shard(step, make_batch(12, seed=step)).raise_for_status()
        announce_checkpoint(sender, step)


def set_policy(sender: Sender, **fields: Any) -> dict[str, Any]:
    answer = sender.http.put(f"/v1/runs/{sender.run}/probe-policy", json=fields).raise_for_status()
    read: dict[str, Any] = answer.json()
    return read


def probes_of(sender: Sender) -> list[dict[str, Any]]:
    return list(reversed(sender.get("probes").json()["items"]))


def probed_steps(sender: Sender) -> list[int]:
    return [probe["step"] for probe in probes_of(sender)]


def test_a_run_has_no_policy_until_one_is_set(run: Sender, context: ServiceContext) -> None:
    read = run.get("probe-policy").json()
    assert (read["state"], read["every_steps"], read["on_alerts"], read["changed_at_us"]) == ("off", None, False, None)
    assert [each["scorer"] for each in read["scorers"]] == list(default_scorers())
    assert make_automatic_probes(context) == 0
    assert probes_of(run) == []


def test_first_checkpoint_of_each_interval_is_probed_once(
    http: httpx.Client, run: Sender, context: ServiceContext
) -> None:
    set_policy(run, every_steps=10, rollouts=4, scorers=[{"scorer": "vllm.prefill"}])
    assert make_automatic_probes(context) == 3
    assert probed_steps(run) == [2, 14, 21]
    assert make_automatic_probes(context) == 0
    work_off(http)
    assert make_automatic_probes(context) == 0
    # A later step of an interval that has its probe is not due, one of a new interval is.
    log_steps(run, 25, 30)
    assert make_automatic_probes(context) == 1
    assert probed_steps(run) == [2, 14, 21, 30]
    assert run.get("probe-policy").json()["automatic_probes"] == 4
    assert "Automatic probes are on." in http.get(f"/pages/runs/{run.run}/probes").text


def test_late_shard_gives_no_second_probe(
    http: httpx.Client, context: ServiceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = start_run(http, "late")
    set_policy(sender, every_steps=1, rollouts=4)
    sender.put_shard(1, make_batch(12), shards=2).raise_for_status()
    announce_checkpoint(sender, 1)
    # The step is not closed yet.
    assert make_automatic_probes(context) == 0
    close_overdue(context)
    assert make_automatic_probes(context) == 1
    sender.put_shard(1, make_batch(3, seed=1), shard=1, shards=2).raise_for_status()
    assert make_automatic_probes(context) == 0
    assert probed_steps(sender) == [1]


def test_the_sample_keeps_the_distribution_of_lengths(http: httpx.Client, run: Sender, context: ServiceContext) -> None:
    set_policy(run, every_steps=100, rollouts=4, scorers=[{"scorer": "vllm.prefill"}])
    make_automatic_probes(context)
    (probe,) = probes_of(run)
    assert (probe["rollouts"], probe["from_sample"]) == (4, True)
    everything, sample = make_batch(12), take_lease(http).rollouts()
    chosen = select_rollouts(everything.sample_ids, everything.response_lengths, 4)
    assert list(sample.sample_ids) == [everything.sample_ids[row] for row in chosen]
    # One of each quarter of the lengths.
    quarters = np.sort(everything.response_lengths).reshape(4, 3)
    assert all(
        low <= each <= high for each, (low, _, high) in zip(np.sort(sample.response_lengths), quarters, strict=True)
    )


def test_steps_near_an_open_alert_come_first(run: Sender, context: ServiceContext, database: Database) -> None:
    add_alert(database, run.run, 24)
    set_policy(run, every_steps=100, on_alerts=True, rollouts=4, scorers=[{"scorer": "vllm.prefill"}])
    assert make_automatic_probes(context) == 3
    probes = probes_of(run)
    assert {probe["step"]: probe["jobs"][0]["priority"] for probe in probes} == {
        14: "urgent",
        21: "urgent",
        2: "normal",
    }
    assert [probe["step"] for probe in probes][:2] == [14, 21]


def test_only_a_few_automatic_probes_wait_at_once(run: Sender, context: ServiceContext, http: httpx.Client) -> None:
    set_policy(run, every_steps=1, rollouts=4, scorers=[{"scorer": "vllm.prefill"}])
    assert make_automatic_probes(context) == UNFINISHED_AT_ONCE
    assert make_automatic_probes(context) == 0
    assert work_off(http) == UNFINISHED_AT_ONCE
    assert make_automatic_probes(context) == 1
    assert probed_steps(run) == [2, 3, 5, 14, 21]


def test_a_step_that_cannot_be_probed_is_counted_and_not_tried_again(run: Sender, context: ServiceContext) -> None:
    set_policy(run, every_steps=100, rollouts=4)
    batch = make_batch(3, seed=7)
    run.put_shard(1, batch, shard=0, shards=2).raise_for_status()
    run.put_shard(1, batch, shard=1, shards=2).raise_for_status()
    announce_checkpoint(run, 1)
    made = make_automatic_probes(context) + make_automatic_probes(context)
    read = run.get("probe-policy").json()
    assert (made, read["automatic_probes"], read["impossible_steps"]) == (1, 1, 1)
    assert probed_steps(run) == [2]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_policy_with_an_unknown_scorer_is_refused(run: Sender) -> None:
    answer = run.http.put(f"/v1/runs/{run.run}/probe-policy", json={"scorers": [{"scorer": "vllm.prefil"}]})
    assert problem_of(answer) == (422, "unknown-scorer")
