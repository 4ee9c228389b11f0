"""Asking for a probe: what is the same request, what is not possible, and which rollouts a sample takes."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from foreshock.clock import now_us
from foreshock.digests import rollout_set_digest
from service.replay.probes.selection import select_rollouts
from service.runs.steps.service import close_overdue_steps
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, take_lease


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with one closed step and its checkpoint."""
    sender = start_run(http)
    sender.put_shard(3, make_batch(12)).raise_for_status()
    announce_checkpoint(sender, 3)
    return sender


def test_a_probe_has_one_job_for_each_engine(run: Sender) -> None:
    answer = ask_for_probe(run, 3, ["torch.trainer", "vllm.prefill", "torch.float32", "vllm.prefill@rebatched"])
    assert answer.status_code == 201
    probe = answer.json()
    assert probe["run"] == run.run
    assert (probe["attempt"], probe["step"], probe["state"], probe["reason"]) == (1, 3, "queued", None)
    assert (probe["rollouts"], probe["from_sample"]) == (12, False)
    scorers = {job["engine"]: [(e["scorer"], e["variant"]) for e in job["scorers"]] for job in probe["jobs"]}
    assert scorers == {
        "torch": [("torch.float32", ""), ("torch.trainer", "")],
        "vllm": [("vllm.prefill", ""), ("vllm.prefill", "rebatched")],
    }


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


def test_two_that_ask_at_once_get_one_probe(run: Sender) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask_for_probe(run, 3), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert all(len(answer.json()["jobs"]) == 1 for answer in answers)


@pytest.mark.parametrize(
    ("step", "scorers", "fields", "slug", "says"),
    [
        (3, ["vllm.unknown"], {}, "unknown-scorer", "available scorers: vllm.prefill, torch.trainer"),
        (3, ["vllm.decode"], {}, "unknown-scorer", "'vllm.decode' is not implemented in this release"),
        (3, ["trainer.rollout"], {}, "unknown-scorer", "unknown scorer 'trainer.rollout'"),
        (3, ["vllm.prefill@shaken"], {}, "unknown-scorer", "unknown variant 'shaken'"),
        (3, ["vllm.prefill", "vllm.prefill"], {}, "probe-not-possible", "named twice"),
        (3, ["vllm.prefill"], {"options": {"torch.trainer": {}}}, "probe-not-possible", "not among the scorers"),
        (3, ["vllm.prefill"], {"checkpoint_step": 2}, "probe-not-possible", "not those of step 2"),
        (4, ["vllm.prefill"], {}, "probe-not-possible", "no rollouts to score"),
        (5, ["vllm.prefill"], {}, "probe-not-possible", "not closed yet (1 of 2 shards are here)"),
        (6, ["vllm.prefill"], {}, "probe-not-possible", "no checkpoint is announced for step 6"),
        (7, ["vllm.prefill"], {}, "probe-not-possible", "has expired"),
        (3, ["vllm.prefill"], {"kind": "guess"}, "invalid-request", "kind"),
        (3, [], {}, "invalid-request", "scorers"),
        (3, ["vllm.prefill"], {"max_rollouts": 0}, "invalid-request", "max_rollouts"),
        (3, ["vllm.prefill"], {"rollouts": 7}, "invalid-request", "rollouts"),
    ],
)
def test_what_is_not_possible_is_said_clearly(
    run: Sender, step: int, scorers: list[str], fields: dict[str, object], slug: str, says: str
) -> None:
    run.put_shard(5, make_batch(2, seed=5), shards=2).raise_for_status()
    run.put_shard(6, make_batch(2, seed=6)).raise_for_status()
    run.put_shard(7, make_batch(2, seed=7)).raise_for_status()
    announce_checkpoint(run, 7, expires_at_us=now_us() - 1)
    answer = ask_for_probe(run, step, scorers, **fields)
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (422, f"urn:foreshock:problem:{slug}"), problem
    assert says in problem["detail"]
    assert run.get("probes").json()["items"] == []


def test_probes_are_listed_newest_first_in_pages(run: Sender) -> None:
    made = [ask_for_probe(run, 3, max_rollouts=number).json()["id"] for number in range(1, 6)]
    first = run.get("probes", limit=3).json()
    second = run.get("probes", limit=3, cursor=first["next_cursor"]).json()
    assert [each["id"] for each in first["items"] + second["items"]] == made[::-1]
    assert second["next_cursor"] is None
    assert run.get("probes", step=9).json()["items"] == []


def test_a_probe_that_is_not_there_and_one_of_a_deleted_run(run: Sender) -> None:
    missing = run.http.get("/v1/probes/probe_nothing")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:foreshock:problem:probe-not-found")
    probe = ask_for_probe(run, 3).json()["id"]
    run.http.delete(f"/v1/runs/{run.run}").raise_for_status()
    assert run.http.get(f"/v1/probes/{probe}").status_code == 410


def test_a_sample_of_several_shards_is_handed_out_as_one_table(http: httpx.Client) -> None:
    run = start_run(http)
    shards = [make_batch(10, seed=seed, prefix=f"s{seed}") for seed in range(3)]
    for number, shard in enumerate(shards):
        run.put_shard(1, shard, shard=number, shards=3).raise_for_status()
    announce_checkpoint(run, 1)
    probe = ask_for_probe(run, 1, max_rollouts=7).json()
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


def test_late_shards_do_not_change_what_a_probe_pinned(
    http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = start_run(http, "late")
    sent.put_shard(1, make_batch(4), shards=2).raise_for_status()
    monkeypatch.setattr("service.runs.steps.service.now_us", lambda: now_us() + 10**13)
    close_overdue_steps(app.state.context)
    announce_checkpoint(sent, 1)
    probe = ask_for_probe(sent, 1).json()
    sent.put_shard(1, make_batch(3, seed=1), shard=1, shards=2).raise_for_status()
    assert take_lease(http).rollouts().num_rollouts == probe["rollouts"] == 4
    # Asked again it means all that is there now, and that is another request.
    assert ask_for_probe(sent, 1).json()["rollouts"] == 7


def test_ids_in_two_shards_cannot_be_scored(http: httpx.Client) -> None:
    run = start_run(http)
    for number in range(2):
        run.put_shard(1, make_batch(4), shard=number, shards=2).raise_for_status()
    announce_checkpoint(run, 1)
    answer = ask_for_probe(run, 1)
    assert answer.status_code == 422
    assert answer.json()["column"] == "sample_id"
    assert ask_for_lease(http).status_code == 204


@given(
    lengths=st.lists(st.integers(0, 5_000), min_size=1, max_size=300),
    most=st.one_of(st.none(), st.integers(1, 400)),
)
def test_a_sample_is_the_same_each_time_and_keeps_the_lengths_spread(lengths: list[int], most: int | None) -> None:
    ids = [f"sample-{number}" for number in range(len(lengths))]
    array = np.array(lengths, dtype=np.int64)
    chosen = select_rollouts(ids, array, most)
    wanted = len(lengths) if most is None else min(most, len(lengths))
    assert chosen.size == wanted
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, select_rollouts(ids, array, most))
    # In any part of the sorted lengths there are as many as belong there, give or take one.
    ranks = np.sort(np.searchsorted(np.sort(array), array[chosen], side="right"))
    expected = (np.arange(wanted) + 1) * len(lengths) / wanted
    assert (ranks >= expected - len(lengths) / wanted - 1).all()
