"""Alerts on the delivery of rollouts: split ranks, steps without all shards, losses; and where they show."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import update

from service.platform.context import ServiceContext
from service.platform.database.tables import Attempt, Run, Step
from service.platform.settings import Settings
from service.runs.runs.service import mark_stale_runs
from service.runs.steps.closing import close_waiting_steps
from tests.service.sending import Sender, make_batch, start_run


def context_of(app: FastAPI) -> ServiceContext:
    context: ServiceContext = app.state.context
    return context


def alerts(http: httpx.Client, run: str, rule: str) -> list[dict[str, Any]]:
    return [each for each in http.get(f"/v1/runs/{run}/alerts").json()["items"] if each["rule"] == rule]


def close_overdue(app: FastAPI) -> None:
    context = context_of(app)
    context.database.write(lambda session: session.execute(update(Step).values(last_shard_at_us=0)))
    close_waiting_steps(context)


def test_attempts_that_begin_together_with_disjoint_shards_raise_an_alert(http: httpx.Client) -> None:
    sender = start_run(http)
    second = sender.new_attempt("rank 1", 0)
    sender.put_shard(3, make_batch(seed=0), shard=0, shards=2)
    assert alerts(http, sender.run, "split_ranks") == []
    second.put_shard(3, make_batch(seed=1), shard=1, shards=2)
    sender.put_shard(4, make_batch(seed=2), shard=0, shards=2)
    second.put_shard(4, make_batch(seed=3), shard=1, shards=2)
    (alert,) = alerts(http, sender.run, "split_ranks")
    assert (alert["severity"], alert["state"], alert["attempt"]) == ("critical", "open", 2)
    assert "Attempts 1 and 2 began within a minute and hold different shards of step 4: 0 and 1 of 2" in alert["why"]
    assert "attempt_key" in alert["what_to_do"]
    # The replay of the detectors leaves it as it is.
    second.put_shard(5, make_batch(seed=4))
    assert alerts(http, sender.run, "split_ranks")[0]["state"] == "open"


def test_later_attempt_or_the_same_shards_are_no_split(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    second = sender.new_attempt("restart", 0)
    sender.put_shard(3, make_batch(seed=0), shard=0, shards=2)
    second.put_shard(3, make_batch(seed=1), shard=0, shards=2)
    third = sender.new_attempt("much later", 0)
    later = (
        update(Attempt).where(Attempt.attempt == third.attempt).values(created_at_us=Attempt.created_at_us + 61_000_000)
    )
    context_of(app).database.write(lambda session: session.execute(later))
    third.put_shard(3, make_batch(seed=2), shard=1, shards=2)
    assert alerts(http, sender.run, "split_ranks") == []


def test_incomplete_step_is_said_everywhere_until_it_is_complete(http: httpx.Client, app: FastAPI) -> None:
    sender = start_run(http)
    for step in (3, 4):
        sender.put_shard(step, make_batch(seed=step), shard=0, shards=2)
        close_overdue(app)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert (alert["severity"], alert["state"], alert["step"]) == ("warning", "open", 3)
    assert "step 4 has 1 of 2 shards, and 1 earlier steps lack shards too" in alert["why"]
    answer = http.get(f"/v1/runs/{sender.run}/measurements", params={"comparison": "trainer/rollout"}).json()
    assert answer["incomplete_steps"] == [
        {"step": step, "attempt": 1, "shards": 1, "expected_shards": 2} for step in (4, 3)
    ]
    parts = ("buckets", "buckets?by=token_id", "tokens", "corrections", "theory", "lint")
    of_step = [http.get(f"/v1/runs/{sender.run}/steps/3/{part}") for part in parts]
    assert [each.json()["incomplete"] for each in of_step] == [answer["incomplete_steps"][1]] * len(parts)
    assert "closed with 1 of 2 shards" in http.get(f"/runs/{sender.run}/steps/3").text
    assert "Step 4 closed with 1 of 2 shards" in http.get(f"/runs/{sender.run}").text
    assert "1 open" in http.get("/").text
    metrics = http.get("/metrics").text
    assert f'foreshock_step_shards{{run="{sender.run}"}} 1.0' in metrics
    assert f'foreshock_step_expected_shards{{run="{sender.run}"}} 2.0' in metrics
    for step in (3, 4):
        sender.put_shard(step, make_batch(seed=10 + step), shard=1, shards=2)
    assert alerts(http, sender.run, "incomplete_step")[0]["state"] == "retracted"
    answer = http.get(f"/v1/runs/{sender.run}/measurements", params={"comparison": "trainer/rollout"}).json()
    assert answer["incomplete_steps"] == []


def heartbeat(http: httpx.Client, sender: Sender, client: str = "host-1-a", **values: object) -> httpx.Response:
    return http.put(f"/v1/runs/{sender.run}/attempts/1/clients/{client}", json=values)


def test_losses_of_clients_are_an_alert(http: httpx.Client) -> None:
    sender = start_run(http)
    assert heartbeat(http, sender, shard=0).status_code == 204
    assert alerts(http, sender.run, "client_losses") == []
    heartbeat(http, sender, shard=0, rejected=2, reason="409 holds other bytes")
    heartbeat(http, sender, "host-2-b", shard=1, dropped=1)
    heartbeat(http, sender, shard=0, rejected=2)
    (alert,) = alerts(http, sender.run, "client_losses")
    assert (alert["value"], alert["state"]) == (3.0, "open")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("attempts/9/clients/a", {}, 404), ("attempts/1/clients/a%20b", {}, 422),
     ("attempts/1/clients/a", {"rejected": -1}, 422), ("attempts/1/clients/a", {"dropped": 2**63}, 422),
     ("attempts/1/clients/a", {"reason": "\x00"}, 422)],
)  # fmt: skip
def test_invalid_heartbeat_is_refused(http: httpx.Client, path: str, body: object, status: int) -> None:
    sender = start_run(http)
    assert http.put(f"/v1/runs/{sender.run}/{path}", json=body).status_code == status


def test_run_without_a_sign_of_life_is_stale_until_the_next_one(
    http: httpx.Client, app: FastAPI, settings: Settings
) -> None:
    sender, silent = start_run(http), start_run(http, key="sends no heartbeats")
    heartbeat(http, sender)
    context = context_of(app)

    def state_after(seconds: float) -> str:
        back = update(Run).values(seen_at_us=Run.seen_at_us - int(seconds * 1e6))
        context.database.write(lambda session: session.execute(back))
        mark_stale_runs(context, 0)
        return str(http.get(f"/v1/runs/{sender.run}").json()["state"])

    assert state_after(settings.stale_seconds - 60) == "running"
    assert state_after(61) == "stale"
    assert http.get(f"/v1/runs/{silent.run}").json()["state"] == "running"
    (alert,) = alerts(http, sender.run, "stale_run")
    assert (alert["severity"], alert["state"], alert["attempt"]) == ("warning", "open", 1)
    assert 'foreshock_runs{state="stale"} 1.0' in http.get("/metrics").text
    assert "stale" in http.get("/").text
    assert "stale" in http.get(f"/runs/{sender.run}").text
    heartbeat(http, sender)
    assert http.get(f"/v1/runs/{sender.run}").json()["state"] == "running"
    sender.put_shard(0, make_batch()).raise_for_status()
    assert alerts(http, sender.run, "stale_run")[0]["state"] == "retracted"
    assert state_after(settings.stale_seconds + 1) == "stale"
    sender.put_shard(1, make_batch())
    assert http.get(f"/v1/runs/{sender.run}").json()["state"] == "running"
    http.patch(f"/v1/runs/{sender.run}", json={"state": "finished"})
    assert state_after(settings.stale_seconds + 1) == "finished"
    heartbeat(http, sender)
    assert http.get(f"/v1/runs/{sender.run}").json()["state"] == "finished"
    http.post(f"/v1/runs/{sender.run}/attempts", json={"key": "resumed", "heartbeats": True})
    assert http.get(f"/v1/runs/{sender.run}").json()["state"] == "running"


def test_service_that_was_away_itself_calls_no_run_stale(app: FastAPI, http: httpx.Client) -> None:
    sender = start_run(http)
    heartbeat(http, sender)
    context = context_of(app)
    context.database.write(lambda session: session.execute(update(Run).values(seen_at_us=0)))
    seen = mark_stale_runs(context, counted_from_us=2**62)
    assert seen == 0
    assert http.get(f"/v1/runs/{sender.run}").json()["state"] == "running"
