"""The levers over HTTP: decided, switched, held, polled, acknowledged or refused; and input that is missing."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import insert

from foreshock import Client
from foreshock.api.watch import LeverReport, advice_record
from foreshock.learning_rate import AdviceFeed
from foreshock.learning_rate.levers import Correction, Rollback
from foreshock_service.platform.database.tables import Checkpoint
from tests.service.server import RunningServer
from tests.service.watch.advice.test_endpoints import trainer_of
from tests.service.watch.advice.test_loop_inputs import step_of
from tests.service.watch.recorded import K3, RecordedRun
from tests.waiting import wait_until

TIS = {"kind": "token_tis", "threshold": "2"}
REWARD = "rollout:reward_mean"
COLLAPSE_FROM, LAST = 41, 60
"""Steps at which the reward of `collapsed` falls, and its last one."""


@pytest.fixture
def run(http: httpx.Client, app: FastAPI) -> RecordedRun:
    return RecordedRun(app.state.context.database).begin(trainer="TRL 1.16.0 GRPOTrainer")


def announce(run: RecordedRun, step: int, expires_at_us: int | None = None) -> None:
    row = {"run_id": run.run, "attempt": run.attempt, "step": step, "root": "runs", "path": f"checkpoint-{step - 1}"}
    rest = {"format": "hf_safetensors", "digest": f"sha256:{step:064x}", "announced_at_us": 1}
    known = {"expires_at_us": expires_at_us, "model_kind": None, "weights_version": None}
    run.database.write(lambda session: session.execute(insert(Checkpoint), [row | rest | known]))


def collapse(run: RecordedRun, last: int = LAST) -> None:
    """Close steps of a run with lag whose reward falls from 0.6 to 0."""
    for step in range(1, last + 1):
        run.close(step, {**step_of(step), REWARD: 0.6 + 0.01 * (step % 3) if step < COLLAPSE_FROM else 0.0})


def read(http: httpx.Client, run: RecordedRun, **query: Any) -> Any:
    return http.get(f"/v1/runs/{run.run}/advice", params=query).raise_for_status().json()


def switch(http: httpx.Client, run: RecordedRun, **modes: str) -> None:
    http.patch(f"/v1/runs/{run.run}", json=modes).raise_for_status()


def operate(http: httpx.Client, run: RecordedRun, **body: Any) -> httpx.Response:
    return http.post(f"/v1/runs/{run.run}/advice/decisions", json={"reason": "a test", **body})


def acknowledge(http: httpx.Client, run: RecordedRun, **body: Any) -> httpx.Response:
    return http.post(f"/v1/runs/{run.run}/advice/ack", json={"revision": 1, "step": 5, **body})


def test_lag_switches_token_tis_on_and_the_rate_is_that_of_lr_advice(http: httpx.Client, run: RecordedRun) -> None:
    run.close(1, step_of(1))
    assert (read(http, run)["remedy"], read(http, run)["why"]) == ("nothing", "")
    for step in range(2, 6):
        run.close(step, step_of(step))
    found = read(http, run, step=6)
    assert found["remedy"] == "correction_and_decay"
    assert found["why"].startswith("Token TIS at 2 and a lower rate: ")
    assert found["rate"] == http.get(f"/v1/runs/{run.run}/lr-advice", params={"step": 6}).json()
    correction = found["correction"]
    assert (correction["mode"], correction["value"], correction["advised"]) == ("shadow", None, TIS)
    # Lag is seen from step 2 on.
    assert correction["points"] == [{"step": 3, "value": TIS}]
    assert found["rollback"]["points"] == []
    switch(http, run, correction_mode="apply")
    after = read(http, run, step=6)
    assert (after["correction"]["value"], after["rate"]["mode"], after["rollback"]["mode"]) == (TIS, "shadow", "shadow")


def test_every_decision_is_a_point_of_the_log(http: httpx.Client, run: RecordedRun) -> None:
    announce(run, 21)
    collapse(run)
    items = http.get(f"/v1/runs/{run.run}/lr-advice/decisions").json()["items"]
    assert [each["revision"] for each in items] == list(range(1, len(items) + 1))
    assert {each["lever"] for each in items} == {"rate", "correction", "rollback"}
    correction, rollback = (
        next(each for each in items if each["lever"] == name) for name in ("correction", "rollback")
    )
    assert (correction["value"], correction["author"], correction["effective_from_step"]) == (TIS, "detector", 3)
    assert rollback["value"]["step"] == 21
    assert all(each["value"] <= 1.0 for each in items if each["lever"] == "rate")


def test_answer_is_polled_as_the_rate_is(http: httpx.Client, run: RecordedRun) -> None:
    run.close(1, step_of(1))
    url = f"/v1/runs/{run.run}/advice"
    first = http.get(url).raise_for_status()
    tag = {"If-None-Match": first.headers["ETag"]}
    assert http.get(url, headers=tag).status_code == 304
    operate(http, run, lever="correction", kind="hold").raise_for_status()
    changed = http.get(url, headers=tag, params={"wait": 20})
    assert (changed.status_code, changed.json()["correction"]["held_by"]) == (200, "operator")


def test_operator_holds_and_sets_a_lever(http: httpx.Client, run: RecordedRun) -> None:
    run.close(1, step_of(1))
    operate(http, run, lever="correction", kind="hold").raise_for_status()
    run.close(2, step_of(2))
    assert read(http, run)["correction"]["points"] == []
    assert operate(http, run, lever="correction", kind="hold").status_code == 409
    mis = {"kind": "sequence_mis", "threshold": "2"}
    revision = read(http, run)["revision"]
    operate(http, run, lever="correction", kind="set", value=mis, seen_revision=revision).raise_for_status()
    assert operate(http, run, lever="correction", kind="release", seen_revision=revision).status_code == 409
    assert read(http, run)["correction"]["advised"] == mis
    for wrong in (
        {"lever": "correction", "kind": "set", "value": {"step": 3, "root": "runs", "path": "x"}},
        {"lever": "rate", "kind": "set", "value": mis},
        {"lever": "correction", "kind": "set", "value": {"kind": "token_tis", "threshold": "0.5"}},
    ):
        assert operate(http, run, **wrong).status_code == 422
    assert operate(http, run, lever="rollback", kind="halve").status_code == 409


def test_what_was_done_is_shown_and_a_refusal_with_its_reason(http: httpx.Client, run: RecordedRun) -> None:
    collapse(run, 5)
    acknowledge(http, run, lever="correction", done=TIS).raise_for_status()
    acknowledge(http, run, lever="rollback", refused="no checkpoint on this disk").raise_for_status()
    rate = {"revision": 1, "step": 5, "applied_lr": 1e-6, "applied_scale": 0.5}
    http.post(f"/v1/runs/{run.run}/lr-advice/ack", json=rate).raise_for_status()
    # What is older changes nothing.
    acknowledge(http, run, lever="correction", step=4, refused="late").raise_for_status()
    known = advice_record(read(http, run))
    assert known.applied is not None
    assert known.applied.scale == 0.5
    assert known.reported == {
        "correction": LeverReport(5, Correction("token_tis", "2")),
        "rollback": LeverReport(5, None, "no checkpoint on this disk"),
    }
    assert acknowledge(http, run, lever="correction", revision=10**6).status_code == 409
    assert acknowledge(http, run, lever="speed").status_code == 422


def test_collapse_proposes_the_newest_checkpoint_before_it_once(http: httpx.Client, run: RecordedRun) -> None:
    for step in (11, 31, 51):
        announce(run, step)
    collapse(run)
    found = read(http, run)
    assert found["remedy"] == "rollback"
    assert found["why"] == (
        "The reward collapsed from step 41: go back to the checkpoint of step 31 and go on with token TIS at 2."
    )
    command = 'trainer.train(resume_from_checkpoint="checkpoint-30")'
    expected = {"step": 31, "root": "runs", "path": "checkpoint-30", "command": command}
    assert (found["rollback"]["advised"], found["rollback"]["value"]) == (expected, None)
    assert [point["value"] for point in found["rollback"]["points"]] == [expected]
    # The run goes back: the correction stays on, and the next episode goes back further.
    run.resume(31)
    after = read(http, run, step=31)
    assert (after["rollback"]["advised"], after["correction"]["advised"]) == (None, TIS)
    for step in range(31, LAST + 1):
        run.close(step, {**step_of(step), REWARD: 0.6 if step < COLLAPSE_FROM else 0.0})
    assert read(http, run)["rollback"]["advised"]["step"] == 11


def test_checkpoint_that_is_gone_is_not_proposed(http: httpx.Client, run: RecordedRun) -> None:
    announce(run, 11)
    announce(run, 31, expires_at_us=1)
    collapse(run)
    assert read(http, run)["rollback"]["advised"]["step"] == 11


def test_run_without_rewards_is_never_sent_back(http: httpx.Client, run: RecordedRun) -> None:
    announce(run, 11)
    for step in range(1, LAST + 1):
        run.close(step, step_of(step))
    found = read(http, run)
    assert (found["correction"]["advised"], found["rollback"]["points"]) == (TIS, [])


def test_run_without_versions_is_advised_as_far_as_is_known(http: httpx.Client, run: RecordedRun) -> None:
    for step in range(1, 6):
        run.close(step, {K3: step_of(step)[K3]})
    found = read(http, run)
    assert found["rollback"]["points"] == []
    assert found["rate"]["advised_scale"] == 1.0


def test_first_start_chooses_modes_and_the_correction(server: RunningServer, http: httpx.Client, tmp_path: Any) -> None:
    def start(**options: Any) -> dict[str, Any]:
        with Client(server.url, run_key="asks", spool_directory=tmp_path) as client:
            client.start_run(resume_step=1, **options)
            assert client.flush(60)
            answer: dict[str, Any] = http.get(f"/v1/runs/{client.run_id}/advice").raise_for_status().json()
        return answer

    first = start(correction_mode="apply", correction="sequence_mis:2")
    assert (first["correction"]["mode"], first["rollback"]["mode"]) == ("apply", "shadow")
    assert first["correction"]["asked"] == {"kind": "sequence_mis", "threshold": "2"}
    again = start(correction_mode="shadow", rollback_mode="apply")
    assert (again["correction"]["mode"], again["rollback"]["mode"]) == ("apply", "apply")


def test_two_trainers_of_one_run_go_back_once(
    server: RunningServer, http: httpx.Client, app: FastAPI, tmp_path: Path
) -> None:
    first = trainer_of(server, tmp_path / "old", "first")
    assert first.run_id is not None
    run = RecordedRun(app.state.context.database, run=first.run_id)
    announce(run, 31)
    collapse(run)
    switch(http, run, correction_mode="apply", rollback_mode="apply")
    called: list[tuple[str, Rollback]] = []
    with AdviceFeed(first) as old:
        old.on_rollback(lambda found: called.append(("old", found)))
        wait_until(lambda: old.rollback(LAST + 1) is not None)
        with AdviceFeed(trainer_of(server, tmp_path / "new", "second", resume_step=31)) as new:
            new.on_rollback(lambda found: called.append(("new", found)))
            wait_until(lambda: new.correction(31) == Correction("token_tis", "2"))
            assert new.rollback(31) is None
            old.rollback(LAST + 2)
    assert [(name, found.step) for name, found in called] == [("old", 31)]
