"""Requests for probes: equal requests, impossible requests, waiting jobs, and the rollouts of a sample."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreshock.clock import now_us
from foreshock.digests import rollout_set_digest
from foreshock.rollouts import BatchAttributes
from foreshock.scorers import SCORERS, Scorer
from foreshock.statistics_shards import FullRollouts
from foreshock_service.maintenance.retention import purge
from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.replay.files import RolloutCount
from tests.service.advancing import close_overdue
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease


def test_a_probe_has_one_job_for_each_engine(run: Sender) -> None:
    answer = ask_for_probe(run, 3, ["torch.trainer", "vllm.prefill", "torch.float32", "vllm.prefill@rebatched"])
    assert answer.status_code == 201
    probe = answer.json()
    assert probe["run"] == run.run
    assert (probe["attempt"], probe["step"], probe["state"]) == (1, 3, "queued")
    assert (probe["rollouts"], probe["from_sample"]) == (12, False)
    scorers = {job["engine"]: [(e["scorer"], e["variant"]) for e in job["scorers"]] for job in probe["jobs"]}
    assert scorers == {
        "torch": [("torch.float32", ""), ("torch.trainer", "")],
        "vllm": [("vllm.prefill", ""), ("vllm.prefill", "rebatched")],
    }


def waiting_reasons(probe: dict[str, Any]) -> dict[tuple[str, ...], str | None]:
    return {tuple(each["scorer"] for each in job["scorers"]): job["reason"] for job in probe["jobs"]}


def test_queued_job_names_scorers_nobody_offers(
    run: Sender, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Takes no job: there is none yet.
    assert ask_for_lease(http, "torch only", scorers=["torch.trainer"]).status_code == 204
    probe = ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"]).json()
    expected = (
        "waiting for a worker that offers vllm.prefill: none was seen in the last 5 minutes; "
        "start one with `foreshock worker`"
    )
    assert waiting_reasons(probe) == {("torch.trainer",): None, ("vllm.prefill",): expected}
    assert probe["reason"] == expected
    assert run.get("probes").json()["items"][0]["reason"] == expected
    # It does not wait for long: another worker comes, and is live for five minutes.
    assert take_lease(http, "vllm only", scorers=["vllm.prefill"]).fail("retry").status_code == 204
    read = http.get(f"/v1/probes/{probe['id']}").json()
    assert (read["reason"], set(waiting_reasons(read).values())) == (None, {None})
    monkeypatch.setattr(
        "foreshock_service.replay.probes.service.database_now_us",
        lambda session: database_now_us(session) + 301_000_000,
    )
    late = http.get(f"/v1/probes/{probe['id']}").json()
    assert all(str(reason).startswith("waiting for a worker") for reason in waiting_reasons(late).values())


def test_queued_job_waits_for_its_accelerator(run: Sender, http: httpx.Client) -> None:
    assert ask_for_lease(http).status_code == 204
    probe = ask_for_probe(run, 3, accelerator="H100").json()
    assert "offers vllm.prefill on H100: none was seen" in probe["reason"]
    assert ask_for_lease(http).status_code == 204
    assert ask_for_lease(http, accelerator="H100", scorers=["torch.float32"]).status_code == 204
    assert ask_for_lease(http, accelerator="H100").status_code == 200


def test_scorer_that_no_live_worker_offers_does_not_hold_up_the_others(run: Sender, http: httpx.Client) -> None:
    assert ask_for_lease(http, scorers=["torch.trainer", "torch.bfloat16"]).status_code == 204
    everything = ["torch.trainer", "torch.trainer@rebatched", "torch.bfloat16", "torch.float32"]
    probe = ask_for_probe(run, 3, everything).json()
    assert [job["engine"] for job in probe["jobs"]] == ["torch", "torch"]
    reasons = waiting_reasons(probe)
    assert reasons.pop(("torch.bfloat16", "torch.trainer", "torch.trainer")) is None
    assert str(reasons.pop(("torch.float32",))).startswith("waiting for a worker that offers torch.float32:")
    assert reasons == {}
    lease = take_lease(http, scorers=["torch.trainer", "torch.bfloat16"]).lease
    assert {each["scorer"] for each in lease["job"]["scorers"]} == {"torch.trainer", "torch.bfloat16"}
    assert take_lease(http, "w2", scorers=["torch.float32"]).lease["job"]["probe"] == probe["id"]


def test_scorer_with_a_new_row_can_be_probed(run: Sender, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SCORERS["vllm.prefill"].place
    row = Scorer("sglang.http", "SGLang over HTTP", 2, place, "sglang", "foreshock_probes.scorers.http_servers:score")
    monkeypatch.setitem(SCORERS, row.name, row)
    probe = ask_for_probe(run, 3, ["sglang.http", "sglang.http@rebatched"]).raise_for_status().json()
    assert [job["engine"] for job in probe["jobs"]] == ["sglang"]
    lease = take_lease(http, scorers=["sglang.http"]).lease
    assert [each["variant"] for each in lease["job"]["scorers"]] == ["", "rebatched"]


def test_the_same_request_is_the_same_probe(run: Sender) -> None:
    first = ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"])
    again = ask_for_probe(run, 3, ["torch.trainer", "vllm.prefill"], attempt=1)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    for other in (
        ask_for_probe(run, 3, ["torch.trainer"]),
        ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"], max_rollouts=3),
        ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"], accelerator="H100"),
        ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"], options={"torch.trainer": {"autocast": None}}),
    ):
        assert other.status_code == 201
        assert other.json()["id"] != first.json()["id"]


def test_other_weights_or_other_rollouts_are_another_request(run: Sender) -> None:
    first = ask_for_probe(run, 3).json()["id"]
    announce_checkpoint(run, 3, digest="sha256:" + "cd" * 32)
    second = ask_for_probe(run, 3).json()["id"]
    assert second != first


def test_concurrent_equal_requests_get_one_probe(run: Sender) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask_for_probe(run, 3), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert all(len(answer.json()["jobs"]) == 1 for answer in answers)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_impossible_request_names_the_fault(run: Sender) -> None:
    run.put_shard(5, make_batch(2, seed=5), shards=2).raise_for_status()
    run.put_shard(6, make_batch(2, seed=6)).raise_for_status()
    run.put_shard(7, make_batch(2, seed=7)).raise_for_status()
    announce_checkpoint(run, 7, expires_at_us=now_us() - 1)
    prefill = ["vllm.prefill"]
    requests: list[tuple[int, list[str], dict[str, object], str, str]] = [
        (3, ["vllm.unknown"], {}, "unknown-scorer", "available scorers: vllm.decode, vllm.prefill, vllm.http"),
        (3, ["trainer.rollout"], {}, "unknown-scorer", "unknown scorer 'trainer.rollout'"),
        (3, ["vllm.prefill@shaken"], {}, "unknown-scorer", "unknown variant 'shaken'"),
        (3, [*prefill, *prefill], {}, "probe-not-possible", "named twice"),
        (3, prefill, {"options": {"torch.trainer": {}}}, "probe-not-possible", "not among the scorers"),
        (4, prefill, {}, "probe-not-possible", "no rollouts to score"),
        (5, prefill, {}, "probe-not-possible", "not closed yet: 1 of 2 shards are stored"),
        (6, prefill, {}, "probe-not-possible", "no checkpoint is announced for step 6"),
        (7, prefill, {}, "probe-not-possible", "has expired"),
        (3, prefill, {"kind": "guess"}, "invalid-request", "kind"),
        (3, [], {}, "invalid-request", "scorers"),
        (3, prefill, {"max_rollouts": 0}, "invalid-request", "max_rollouts"),
        (3, prefill, {"rollouts": 7}, "invalid-request", "rollouts"),
        (3, prefill, {"priority": "asap"}, "invalid-request", "priority"),
    ]
    for step, scorers, fields, slug, expected in requests:
        answer = ask_for_probe(run, step, scorers, **fields)
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (422, f"urn:foreshock:problem:{slug}"), problem
        assert expected in problem["detail"]
    assert run.get("probes").json()["items"] == []


def test_probes_are_listed_newest_first_in_pages(run: Sender) -> None:
    made = [ask_for_probe(run, 3, max_rollouts=number).json()["id"] for number in range(1, 6)]
    first = run.get("probes", limit=3).json()
    second = run.get("probes", limit=3, cursor=first["next_cursor"]).json()
    assert [each["id"] for each in first["items"] + second["items"]] == made[::-1]
    assert second["next_cursor"] is None
    assert run.get("probes", step=9).json()["items"] == []


def test_unknown_probe_is_not_found_and_one_of_a_deleted_run_is_gone(run: Sender) -> None:
    missing = run.http.get("/v1/probes/probe_nothing")
    assert problem_of(missing) == (404, "probe-not-found")
    probe = ask_for_probe(run, 3).json()["id"]
    run.http.delete(f"/v1/runs/{run.run}").raise_for_status()
    assert run.http.get(f"/v1/probes/{probe}").status_code == 410


def test_a_sample_of_several_shards_is_handed_out_as_one_table(sender: Sender, http: httpx.Client) -> None:
    shards = [make_batch(10, seed=seed, prefix=f"s{seed}") for seed in range(3)]
    for number, shard in enumerate(shards):
        sender.put_shard(1, shard, shard=number, shards=3).raise_for_status()
    announce_checkpoint(sender, 1)
    probe = ask_for_probe(sender, 1, max_rollouts=7).json()
    assert (probe["rollouts"], probe["from_sample"]) == (7, True)
    holder = take_lease(http)
    rollouts = holder.rollouts()
    everything = [sample_id for shard in shards for sample_id in shard.sample_ids]
    assert rollouts.num_rollouts == 7
    assert [sample_id for sample_id in everything if sample_id in set(rollouts.sample_ids)] == rollouts.sample_ids
    assert holder.lease["job"]["rollouts"] == {
        "count": 7,
        "tokens": rollouts.num_tokens,
        "digest": rollout_set_digest(rollouts.sample_ids),
    }


def test_late_shards_change_no_pinned_probe(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = start_run(http, "late")
    sent.put_shard(1, make_batch(4), shards=2).raise_for_status()
    close_overdue(app.state.context)
    announce_checkpoint(sent, 1)
    probe = ask_for_probe(sent, 1).json()
    sent.put_shard(1, make_batch(3, seed=1), shard=1, shards=2).raise_for_status()
    assert take_lease(http).rollouts().num_rollouts == probe["rollouts"] == 4
    # Asked again it means all that is there now, and that is another request.
    assert ask_for_probe(sent, 1).json()["rollouts"] == 7


def test_sample_id_in_two_shards_cannot_be_scored(sender: Sender, http: httpx.Client) -> None:
    for number in range(2):
        sender.put_shard(1, make_batch(4), shard=number, shards=2).raise_for_status()
    announce_checkpoint(sender, 1)
    answer = ask_for_probe(sender, 1)
    assert answer.status_code == 422
    assert answer.json()["column"] == "sample_id"
    assert ask_for_lease(http).status_code == 204


def test_a_step_of_statistics_is_replayed_on_its_sample_and_says_so(sender: Sender) -> None:
    sender.put_statistics(1, make_batch(40), 0, 2, FullRollouts(6, 3)).raise_for_status()
    sender.put_shard(1, make_batch(10, 1), 1, 2).raise_for_status()
    announce_checkpoint(sender, 1)
    probe = ask_for_probe(sender, 1).raise_for_status().json()
    # The rollouts that were chosen for their large differences would bias every figure of the replay.
    assert (probe["rollouts"], probe["from_sample"]) == (16, True)


def test_probes_of_all_runs_are_listed_newest_first_and_filtered(run: Sender, http: httpx.Client) -> None:
    other = start_run(http, key="another", project="another")
    other.put_shard(3, make_batch(4)).raise_for_status()
    announce_checkpoint(other, 3)
    made = [
        ask_for_probe(sender, 3, [name]).json() for sender in (run, other) for name in ("vllm.prefill", "torch.trainer")
    ]
    found = http.get("/v1/probes").raise_for_status().json()["items"]
    assert [probe["id"] for probe in found] == [probe["id"] for probe in reversed(made)]
    first = http.get("/v1/probes", params={"limit": 3}).json()
    rest = http.get("/v1/probes", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert first["items"] + rest["items"] == found
    of_project = http.get("/v1/probes", params={"project": "another"}).json()["items"]
    assert {probe["run"] for probe in of_project} == {other.run}
    assert http.get("/v1/probes", params={"kind": "weights"}).json()["items"] == []


def test_request_whose_rollouts_change_meanwhile_is_refused(
    run: Sender, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = app.state.context
    work = context.decoders.run

    def purge_first(function: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(context.decoders, "run", work)
        run.put_shard(100, make_batch(4)).raise_for_status()
        kept = {"retention_last_steps": 1, "retention_alert_steps": 0}
        list(purge(replace(context, settings=context.settings.model_copy(update=kept))))
        return RolloutCount(12, 60, rollout_set_digest(["a"]), 12, BatchAttributes(), with_log_probs=True)

    monkeypatch.setattr(context.decoders, "run", purge_first)
    refused = ask_for_probe(run, 3)
    assert problem_of(refused) == (422, "probe-not-possible")
    assert "were purged or arrived while the request was checked" in refused.json()["detail"]
