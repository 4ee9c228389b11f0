"""Alerts on the delivery of rollouts: steps without all shards, losses; and where they show."""

import random
from typing import Any

import httpx
from sqlalchemy import update

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.tables import Run
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.runs import mark_stale_runs
from tests.service.advancing import close_overdue
from tests.service.sending import Sender, make_batch, start_run


def alerts(http: httpx.Client, run: str, rule: str) -> list[dict[str, Any]]:
    return [each for each in http.get(f"/v1/runs/{run}/alerts").json()["items"] if each["rule"] == rule]


def standing(http: httpx.Client, run: str) -> list[dict[str, Any]]:
    """Return what the standing alerts on delivery say, without ids and times."""
    names = ("attempt", "rule", "step", "severity", "value", "threshold", "why", "evidence", "state")
    found = [
        {name: each[name] for name in names}
        for each in http.get(f"/v1/runs/{run}/alerts?state=open").json()["items"]
        if each["rule"] == "incomplete_step"
    ]
    return sorted(found, key=lambda each: (each["attempt"], each["rule"]))


def test_alerts_on_delivery_are_the_same_in_any_order_of_arrival(http: httpx.Client, context: ServiceContext) -> None:
    # (attempt, step, shard) of two shards a step. Steps 4 and 6 stay incomplete, step 3 until the late shard has come;
    # the first attempt keeps steps 4 and 5 without a shard, which the second one supersedes from step 5 on.
    shards = [(1, 3, 0), (1, 3, 1), (1, 4, 0), (1, 5, 1), (1, 6, 0), (2, 5, 0), (2, 5, 1), (2, 6, 1), (2, 7, 0)]
    batches = {key: make_batch(seed=number) for number, key in enumerate(shards)}
    seen = []
    for number in range(8):
        sender = start_run(http, key=f"order {number}")
        senders = {1: sender, 2: sender.new_attempt("other rank", 5)}
        draw = random.Random(number)
        order = shards if number == 0 else draw.sample(shards, len(shards))
        for key in order:
            attempt, step, shard = key
            senders[attempt].put_shard(step, batches[key], shard=shard, shards=2).raise_for_status()
            if draw.random() < 0.3:
                close_overdue(context)
        close_overdue(context)
        seen.append(standing(http, sender.run))
    assert all(each == seen[0] for each in seen)
    assert [(each["attempt"], each["rule"], each["step"]) for each in seen[0]] == [
        (1, "incomplete_step", 4),
        (2, "incomplete_step", 6),
    ]
    assert seen[0][0]["evidence"] == {"steps": {"4": [1, 2]}, "missing_at_newest_step": [1]}


def test_rewind_takes_superseded_steps_out_of_the_alert(
    sender: Sender, http: httpx.Client, context: ServiceContext
) -> None:
    for step in (3, 4, 5):
        sender.put_shard(step, make_batch(seed=step), shard=0, shards=2)
    close_overdue(context)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert list(alert["evidence"]["steps"]) == ["3", "4", "5"]
    sender.new_attempt("resumed", 4)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert (alert["state"], alert["step"], alert["evidence"]["steps"]) == ("open", 3, {"3": [1, 2]})


def test_incomplete_step_is_said_everywhere_until_it_is_complete(http: httpx.Client, context: ServiceContext) -> None:
    sender = start_run(http)
    for step in (3, 4):
        sender.put_shard(step, make_batch(seed=step), shard=0, shards=2)
        close_overdue(context)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert (alert["severity"], alert["state"], alert["step"]) == ("warning", "open", 3)
    assert alert["why"].startswith("Rank 1 sent nothing in all 2 steps. Measures of")
    answer = http.get(f"/v1/runs/{sender.run}/measurements", params={"comparison": "trainer/rollout"}).json()
    assert answer["incomplete_steps"] == [
        {"step": step, "attempt": 1, "shards": 1, "expected_shards": 2} for step in (4, 3)
    ]
    parts = ("buckets", "buckets?by=token_id", "tokens", "corrections", "theory", "lint")
    of_step = [http.get(f"/v1/runs/{sender.run}/steps/3/{part}") for part in parts]
    assert [each.json()["incomplete"] for each in of_step] == [answer["incomplete_steps"][1]] * len(parts)
    assert "closed with 1 of 2 shards" in http.get(f"/runs/{sender.run}/steps/3").text
    assert "Step 4 closed with 1 of 2 shards (missing: rank 1)" in http.get(f"/runs/{sender.run}").text
    assert 'aria-label="warning"' in http.get("/").text
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


def test_ranks_that_are_missing_now_and_then_are_named_at_the_newest_step(
    http: httpx.Client, context: ServiceContext
) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch(seed=1))
    for step, arrived in ((2, 0), (3, 0)):
        sender.put_shard(step, make_batch(seed=step), shard=arrived, shards=512)
        close_overdue(context)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert alert["why"].startswith("Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 503 more sent nothing in 2 steps, 2 to 3. ")
    assert len(sender.get("diagnosis").json()["headline"]) <= 200
    sender.put_shard(4, make_batch(seed=4), shard=1, shards=2)
    close_overdue(context)
    (alert,) = alerts(http, sender.run, "incomplete_step")
    assert "step 4 has 1 of 2 shards (missing: rank 0), and 2 earlier steps lack shards too" in alert["why"]


def test_losses_of_clients_are_an_alert(sender: Sender, http: httpx.Client) -> None:
    assert heartbeat(http, sender, shard=0).status_code == 204
    assert alerts(http, sender.run, "client_losses") == []
    heartbeat(http, sender, shard=0, rejected=2, reason="409 holds other bytes")
    heartbeat(http, sender, "host-2-b", shard=1, dropped=1)
    heartbeat(http, sender, shard=0, rejected=2)
    (alert,) = alerts(http, sender.run, "client_losses")
    assert (alert["value"], alert["state"]) == (3.0, "open")


def test_what_hooks_warn_of_is_missing_until_the_next_attempt(sender: Sender, http: httpx.Client) -> None:
    sender.put_shard(1, make_batch(seed=1)).raise_for_status()
    remark = "verl: entropy has [4] and the responses have [4, 6]: it is not logged, the rest is"

    def remarks() -> list[str]:
        missing = sender.get("diagnosis").json()["missing"]
        return [each["sentence"] for each in missing if "verl" in each["sentence"]]

    assert remarks() == []
    for client, shard in (("host-1-a", 0), ("host-2-b", 1)):
        heartbeat(http, sender, client, shard=shard, remarks=[remark])
    assert remarks() == [remark], "all ranks say the same"
    assert remark[1:] in sender.http.get(f"/runs/{sender.run}").text
    sender.new_attempt("again", 2)
    sender.put_shard(2, make_batch(seed=2))
    assert remarks() == []


def test_run_without_a_sign_of_life_is_stale_until_one(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender, silent = start_run(http), start_run(http, key="sends no heartbeats")
    heartbeat(http, sender)

    def state_after(seconds: float) -> str:
        back = update(Run).values(seen_at_us=Run.seen_at_us - int(seconds * 1e6))
        context.database.write(lambda session: session.execute(back))
        mark_stale_runs(context, 0)
        return str(sender.about()["state"])

    assert state_after(settings.stale_seconds - 60) == "running"
    assert state_after(61) == "stale"
    assert silent.about()["state"] == "running"
    (alert,) = alerts(http, sender.run, "stale_run")
    assert (alert["severity"], alert["state"], alert["attempt"]) == ("warning", "open", 1)
    assert 'foreshock_runs{state="stale"} 1.0' in http.get("/metrics").text
    assert "stale" in http.get("/").text
    assert "stale" in http.get(f"/runs/{sender.run}").text
    heartbeat(http, sender)
    assert sender.about()["state"] == "running"
    assert alerts(http, sender.run, "stale_run")[0]["state"] == "resolved"
    assert state_after(settings.stale_seconds + 1) == "stale"
    heartbeat(http, sender)
    assert sender.about()["state"] == "running"
    http.patch(f"/v1/runs/{sender.run}", json={"state": "finished"})
    assert state_after(settings.stale_seconds + 1) == "finished"
    heartbeat(http, sender)
    assert sender.about()["state"] == "finished"
    http.post(f"/v1/runs/{sender.run}/attempts", json={"key": "resumed", "heartbeats": True})
    assert sender.about()["state"] == "running"


def test_only_the_trainer_itself_ends_its_silence(
    http: httpx.Client, context: ServiceContext, settings: Settings
) -> None:
    sender = start_run(http)
    attempt = {"key": "dies in a step", "heartbeats": True}
    sender = Sender(http, sender.run, http.post(f"/v1/runs/{sender.run}/attempts", json=attempt).json()["attempt"])
    sender.put_shard(1, make_batch(seed=0), shard=0, shards=2).raise_for_status()
    context.database.write(lambda session: session.execute(update(Run).values(seen_at_us=0)))
    mark_stale_runs(context, 0)
    (opened,) = alerts(http, sender.run, "stale_run")
    # The service closes the step, and another client sends what the dead one left in its spool.
    close_overdue(context)
    assert sender.get("steps").json()["items"][0]["closed"]
    sender.put_shard(2, make_batch(seed=1)).raise_for_status()
    sender.put_scalars(3, {"reward": 1.0}).raise_for_status()
    assert http.post(f"/v1/runs/{sender.run}/attempts", json=attempt).status_code == 200
    assert sender.about()["state"] == "stale"
    assert alerts(http, sender.run, "stale_run") == [opened]
    # The trainer lives, and reports its end.
    end = {"state": "finished", "attempt": sender.attempt}
    assert http.patch(f"/v1/runs/{sender.run}", json=end).json()["state"] == "finished"
    assert alerts(http, sender.run, "stale_run")[0]["state"] == "resolved"


def test_service_that_was_away_itself_calls_no_run_stale(
    context: ServiceContext, sender: Sender, http: httpx.Client
) -> None:
    heartbeat(http, sender)
    context.database.write(lambda session: session.execute(update(Run).values(seen_at_us=0)))
    seen = mark_stale_runs(context, counted_from_us=2**62)
    assert seen == 0
    assert sender.about()["state"] == "running"
