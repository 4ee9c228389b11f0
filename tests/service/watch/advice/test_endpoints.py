"""Advice over HTTP: absolute state, entity tags, long polls, acknowledgements, an operator's decisions."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import update

from foreshock import Client
from foreshock.learning_rate import AdviceFeed
from foreshock.learning_rate.advice import Advice
from foreshock_service.platform.compression import etag_of
from foreshock_service.platform.database.tables import FoldedAdvice
from tests.service.sending import Sender, problem_of, start_run
from tests.service.server import RunningServer
from tests.service.watch.advice.test_loop_inputs import LAG
from tests.service.watch.recorded import K3, LENGTH, SURGE, SURGE_STEPS, RecordedRun
from tests.waiting import wait_until


@pytest.fixture
def surged(http: httpx.Client, app: FastAPI) -> RecordedRun:
    """A run in mode apply that surged at step 111; `http` talks to its service."""
    run = RecordedRun(app.state.context.database).begin(advice_mode="apply")
    run.close_all({LENGTH: SURGE}, SURGE_STEPS)
    return run


def halved_at(answer: httpx.Response) -> int:
    """Return the step at which the last point halves the scale."""
    earlier, point = answer.raise_for_status().json()["rate"]["points"]
    assert point["halvings"] == earlier["halvings"] + 1
    return int(point["step"])


def address(run: RecordedRun) -> str:
    return f"/v1/runs/{run.run}/lr-advice"


def operate(http: httpx.Client, run: RecordedRun, kind: str) -> httpx.Response:
    return http.post(f"/v1/runs/{run.run}/advice/decisions", json={"kind": kind, "reason": "a test"})


def test_new_run_is_warming_and_gets_scale_1(sender: Sender) -> None:
    answer = sender.get("lr-advice", step=7).raise_for_status()
    advice = answer.json()
    assert advice["run"] == sender.run
    assert answer.headers["ETag"] == etag_of("1-0-0", answer.content)
    assert (advice["scale"], advice["phase"], advice["mode"], advice["schedule"]) == (1.0, "warming", "shadow", None)
    assert (advice["attempt"], advice["revision"], advice["observed_step"]) == (1, 0, None)
    assert advice["next_decay_step"] is None
    assert advice["alerts"] == []


def test_answer_is_the_whole_state(http: httpx.Client, surged: RecordedRun) -> None:
    advice = http.get(address(surged), params={"step": 119}).raise_for_status().json()
    assert advice["schedule"] == {"surge_step": 111, "decay_period": 199, "factor": 0.5, "floor": 0.1}
    (point,) = advice["points"]
    assert (point["step"], point["halvings"], point["boundary"], point["period"]) == (115, 0, 199, 199)
    assert (advice["phase"], advice["mode"], advice["next_decay_step"]) == ("decaying", "apply", 199)
    assert (advice["observed_step"], advice["stale"], advice["want_weights_at_step"]) == (118, False, 120)
    assert [alert["rule"] for alert in advice["alerts"]] == ["length_surge"]
    scales = [http.get(address(surged), params={"step": step}).json()["scale"] for step in (198, 199, 398, 597, 796)]
    assert scales == [1.0, 0.5, 0.25, 0.125, 0.1]


def test_policy_of_probes_says_whose_weights_are_wanted(sender: Sender, http: httpx.Client) -> None:
    def wanted(step: int) -> object:
        return sender.get("lr-advice", step=step).raise_for_status().json()["want_weights_at_step"]

    assert (wanted(7), wanted(50)) == (50, 100)
    policy = {"every_steps": 20, "scorers": [{"scorer": "torch.float32"}]}
    http.put(f"/v1/runs/{sender.run}/probe-policy", json=policy).raise_for_status()
    assert (wanted(7), wanted(19), wanted(20)) == (20, 20, 40)


def test_client_computes_the_same_scale_for_every_step(http: httpx.Client, surged: RecordedRun) -> None:
    operate(http, surged, "halve")
    answers = {step: http.get(address(surged), params={"step": step}).json() for step in (119, 198, 199, 400, 2000)}
    advice = Advice.from_json(answers[119])
    assert {step: advice.scale(step) for step in answers} == {step: each["scale"] for step, each in answers.items()}
    assert answers[199]["scale"] == 0.25


def test_shadow_mode_gives_scale_1_and_shows_the_advice(http: httpx.Client, surged: RecordedRun) -> None:
    before = http.get(address(surged), params={"step": 250})
    http.patch(f"/v1/runs/{surged.run}", json={"advice_mode": "shadow"}).raise_for_status()
    shadow = http.get(address(surged), params={"step": 250})
    assert (shadow.json()["scale"], shadow.json()["advised_scale"]) == (1.0, 0.5)
    assert shadow.json()["mode"] == "shadow"
    assert shadow.headers["ETag"] != before.headers["ETag"]
    http.patch(f"/v1/runs/{surged.run}", json={"advice_mode": "apply"}).raise_for_status()
    assert http.get(address(surged), params={"step": 250}).json()["scale"] == 0.5


def test_equal_entity_tags_mean_equal_bytes(http: httpx.Client, surged: RecordedRun) -> None:
    def answers() -> list[httpx.Response]:
        return [http.get(address(surged), params={"step": step}) for step in (119, 119, 250, 9999)]

    seen = answers()
    etag = seen[0].headers["ETag"]
    same = http.get(address(surged), params={"step": 119}, headers={"If-None-Match": etag})
    assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
    surged.close(119, {LENGTH: 260.0})
    newer = http.get(address(surged), params={"step": 119}, headers={"If-None-Match": etag}).raise_for_status()
    assert (newer.status_code, newer.json()["observed_step"]) == (200, 119)
    seen += answers()
    body = {"revision": 1, "step": 119, "applied_lr": 1e-6}
    http.post(f"{address(surged)}/ack", json=body).raise_for_status()
    seen += answers()
    alert = surged.alerts()[0].id
    http.post(f"/v1/runs/{surged.run}/alerts/{alert}/acknowledge").raise_for_status()
    seen += answers()
    operate(http, surged, "halve").raise_for_status()
    seen += answers()
    pairs = {(answer.headers["ETag"], answer.content) for answer in seen}
    assert len(pairs) == len({etag for etag, _ in pairs}) == len({content for _, content in pairs}) == 15


def test_closed_step_does_not_end_a_long_poll_and_is_in_its_answer(http: httpx.Client, surged: RecordedRun) -> None:
    etag = http.get(address(surged), params={"step": 119}).headers["ETag"]
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        params = {"step": 119, "wait": 2}
        waiting = pool.submit(http.get, address(surged), params=params, headers={"If-None-Match": etag})
        time.sleep(0.5)
        surged.close(119, {LENGTH: 260.0})
        answer = waiting.result(timeout=60)
    assert time.monotonic() - started >= 2
    assert (answer.status_code, answer.json()["observed_step"]) == (200, 119)


@pytest.mark.parametrize("news", ["operator", "mode", "alert", "step", "deletion"])
def test_long_poll_ends_at_a_change(http: httpx.Client, surged: RecordedRun, news: str) -> None:
    run = f"/v1/runs/{surged.run}"
    polled = [address(surged), f"{run}/alerts"] if news in ("alert", "deletion") else [address(surged)]

    def poll(path: str, etag: str) -> httpx.Response:
        return http.get(path, params={"wait": 30}, headers={"If-None-Match": etag})

    etags = [http.get(path).headers["ETag"] for path in polled]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(poll, path, etag) for path, etag in zip(polled, etags, strict=True)]
        time.sleep(0.3)
        assert not any(each.done() for each in waiting)
        started = time.monotonic()
        if news == "operator":
            operate(http, surged, "hold").raise_for_status()
        elif news == "mode":
            http.patch(run, json={"advice_mode": "shadow"}).raise_for_status()
        elif news == "alert":
            http.post(f"{run}/alerts/{surged.alerts()[0].id}/resolve").raise_for_status()
        elif news == "step":
            surged.close_all({LENGTH: [260.0] * 5, K3: [0.2] * 5}, range(119, 124))
        else:
            http.delete(run).raise_for_status()
        status = 410 if news == "deletion" else 200
        assert {each.result(timeout=60).status_code for each in waiting} == {status}
    if news == "deletion":
        assert poll(*polled[:1], *etags[:1]).status_code == 410
    assert time.monotonic() - started < 25


def test_long_polls_hold_neither_threads_nor_connections(http: httpx.Client, surged: RecordedRun) -> None:
    etag = http.get(address(surged)).headers["ETag"]
    headers = {"If-None-Match": etag}
    limits = httpx.Limits(max_connections=100)
    # More than the thread pool (40) and the connection pool have.
    with httpx.Client(base_url=http.base_url, timeout=60, limits=limits) as many, ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(many.get, address(surged), params={"wait": 28}, headers=headers) for _ in range(60)]
        time.sleep(1.5)
        assert http.get("/livez").status_code == 200
        assert http.get(address(surged)).status_code == 200
        assert not any(each.done() for each in waiting)
        operate(http, surged, "hold").raise_for_status()
        assert {each.result(timeout=60).status_code for each in waiting} == {200}


def test_advice_at_a_far_step_is_stale(http: httpx.Client, surged: RecordedRun) -> None:
    stale = {
        step: http.get(address(surged), params={"step": step}).json()["stale"] for step in (0, 119, 128, 129, 9999)
    }
    assert stale == {0: False, 119: False, 128: False, 129: True, 9999: True}
    for wrong in ({"step": -1}, {"step": 2**31}, {"wait": 31}, {"wait": -1}, {"wait": "nan"}):
        assert http.get(address(surged), params=wrong).status_code == 422


def test_acknowledged_steps_are_not_changed_by_later_decisions(http: httpx.Client, surged: RecordedRun) -> None:
    for _ in range(2):
        acknowledged = http.post(f"{address(surged)}/ack", json={"revision": 1, "step": 150, "applied_lr": 1e-6})
        assert acknowledged.status_code == 204
    assert halved_at(operate(http, surged, "halve")) == 151
    unknown = http.post(f"{address(surged)}/ack", json={"revision": 9, "step": 151, "applied_lr": 1e-6})
    assert unknown.status_code == 409
    absent = http.post(f"{address(surged)}/ack", json={"revision": 1, "step": 1, "applied_lr": 1e-6, "attempt": 5})
    assert absent.status_code == 404


def trainer_of(server: RunningServer, folder: Path, attempt: str, resume_step: int = 0) -> Client:
    """Start an attempt of the run `two-trainers`, as a trainer on another machine does."""
    client = Client(server.url, run_key="two-trainers", attempt_key=attempt, spool_directory=folder, strict=True)
    client.start_run(advice_mode="apply", resume_step=resume_step)
    assert client.flush(60)
    return client


def test_old_trainer_that_still_reports_does_not_hold_back_the_advice_of_the_new_one(
    http: httpx.Client, server: RunningServer, app: FastAPI, tmp_path: Path
) -> None:
    old = trainer_of(server, tmp_path / "old", "first")
    new = trainer_of(server, tmp_path / "new", "second", resume_step=4)
    assert (old.attempt, new.attempt, old.run_id) == (1, 2, new.run_id)
    assert old.run_id is not None
    run = RecordedRun(app.state.context.database, run=old.run_id)
    run.close_all({K3: [2e-4, 1e-1, 1e-1], LAG: [0.0, 8.0, 8.0]}, range(1, 4))
    # Attempt 1 dies slowly: what it did last is reported after attempt 2 has resumed.
    with AdviceFeed(old) as feed:
        feed.acknowledge(300, 1e-6, 1.0)
        feed.scale(300)
        assert old.flush(60)
        wait_until(lambda: feed._followed_step == 300)
    assert old.counters.rejected == 0
    run.attempt = 2
    run.close_all({K3: [1e-1] * 37, LAG: [8.0] * 37}, range(4, 41))
    log = http.get(f"{address(run)}/decisions").json()["items"]
    of_rate = [each for each in log if each["attempt"] == 2 and each["lever"] == "rate"]
    assert [each["effective_from_step"] for each in of_rate][:2] == [4, 5]
    advice = http.get(address(run), params={"step": 40}).raise_for_status().json()
    assert (advice["attempt"], advice["scale"], advice["applied"]) == (2, pytest.approx(0.1), None)
    # The new trainer's own steps count.
    with AdviceFeed(new) as own:
        own.acknowledge(50, 1e-7, 0.1)
        assert new.flush(60)
    assert http.get(address(run)).json()["applied"]["step"] == 50
    operate(http, run, "raise").raise_for_status()
    assert http.get(f"{address(run)}/decisions").json()["items"][-1]["effective_from_step"] == 51
    for client in (old, new):
        client.close()


@pytest.mark.parametrize(("path", "body"), [("ack", {"revision": 1, "applied_lr": 1e-6}), ("follow", {})])
def test_report_of_another_attempt_changes_nothing(
    http: httpx.Client, surged: RecordedRun, path: str, body: dict[str, Any]
) -> None:
    surged.resume(117)

    def report(step: int, **attempt: int) -> httpx.Response:
        return http.post(f"{address(surged)}/{path}", json={"step": step, **body, **attempt}).raise_for_status()

    late = report(300, attempt=1)
    assert (late.status_code, late.json()["newest_attempt"]) == (200, 2)
    assert "attempt 2" in late.json()["why"]
    assert report(117, attempt=2).status_code == 204
    # A trainer that names no attempt is taken for the newest one's.
    assert report(118).status_code == 204
    assert halved_at(operate(http, surged, "halve")) == 119


def test_only_the_step_that_a_trainer_follows_with_is_fixed(http: httpx.Client, surged: RecordedRun) -> None:
    http.get(address(surged), params={"step": 5000}).raise_for_status()
    for step in (130, 125):
        assert http.post(f"{address(surged)}/follow", json={"step": step}).status_code == 204
    # A trainer of another attempt changes nothing of this one.
    http.post(f"{address(surged)}/follow", json={"step": 4000, "attempt": 7}).raise_for_status()
    assert halved_at(operate(http, surged, "halve")) == 131


def test_operator_holds_releases_halves_and_raises(http: httpx.Client, surged: RecordedRun) -> None:
    assert operate(http, surged, "hold").json()["rate"]["phase"] == "held"
    assert operate(http, surged, "hold").status_code == 409
    assert http.get(address(surged), params={"step": 5000}).json()["scale"] == 1.0
    assert operate(http, surged, "release").json()["rate"]["next_decay_step"] == 199
    assert operate(http, surged, "halve").json()["rate"]["scale"] == 0.5
    assert operate(http, surged, "raise").json()["rate"]["scale"] == 1.0
    refused = operate(http, surged, "raise")
    assert problem_of(refused) == (409, "advice-conflict")
    log = http.get(f"{address(surged)}/decisions").json()["items"]
    assert [entry["kind"] for entry in log] == ["surge", "hold", "release", "halve", "raise"]
    assert [entry["revision"] for entry in log] == [1, 2, 3, 4, 5]
    assert operate(http, surged, "surge").status_code == 422


def test_run_that_has_ended_is_offered_nothing_until_it_runs_again(http: httpx.Client, surged: RecordedRun) -> None:
    running = http.get(address(surged)).json()
    assert running["reason"].endswith("No mismatch, gradient or reward signal corroborates it.")
    http.patch(f"/v1/runs/{surged.run}", json={"state": "finished"}).raise_for_status()
    ended = http.get(address(surged)).json()
    assert ended["reason"] == "The run has ended: there is nothing to advise."
    assert http.get(f"/v1/runs/{surged.run}/advice").json()["remedy"] == "nothing"
    assert (ended["next_decay_step"], ended["want_weights_at_step"]) == (None, None)
    # The state is absolute: a late poll still gets it.
    assert ended["schedule"] == running["schedule"]
    refused = operate(http, surged, "halve")
    assert problem_of(refused) == (409, "advice-conflict")
    assert "set it to 'running'" in refused.json()["detail"]
    http.patch(f"/v1/runs/{surged.run}", json={"state": "running"}).raise_for_status()
    assert http.get(address(surged)).json()["next_decay_step"] == 199


def test_state_of_another_release_is_folded_from_the_log(http: httpx.Client, surged: RecordedRun) -> None:
    operate(http, surged, "halve").raise_for_status()
    expected = http.get(address(surged)).json()
    older = update(FoldedAdvice).values(state={"scale": 0.5})
    surged.database.write(lambda session: session.execute(older))
    assert http.get(address(surged)).json() == expected
    # The other runs are exported, and the next decision stores a state that can be read.
    other = start_run(http, "other")
    shown = http.get("/metrics").text
    assert f'foreshock_advice_revision{{run="{other.run}"}} 0.0' in shown
    assert f'foreshock_advice_revision{{run="{surged.run}"}}' not in shown
    operate(http, surged, "hold").raise_for_status()
    assert f'foreshock_advice_revision{{run="{surged.run}"}} 3.0' in http.get("/metrics").text
    assert surged.advice().held_from_step is not None


def test_sum_of_the_learning_rate_is_a_second_clock(http: httpx.Client, surged: RecordedRun) -> None:
    assert http.get(address(surged)).json()["learning_rate_sum"] is None
    for step in (119, 120):
        surged.log(step, {"lr": 1e-6})
        surged.close(step, {LENGTH: 260.0})
    assert http.get(address(surged)).json()["learning_rate_sum"] == pytest.approx(2e-6)
