"""The attribution that the service computes when scores are published, against the bare formulas."""

import dataclasses
import itertools

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray

from foreshock.client.reader import Reader
from foreshock.commands.queries import wait_for_attribution
from foreshock.rollouts import decode_rollouts
from foreshock.statistics_shards import FullRollouts, StatisticsShard, encode_statistics_shard
from foreshock_service.platform.context import ServiceContext
from foreshock_service.replay.attribution.service import compute_stale_attributions, mark_attribution_stale
from foreshock_service.replay.results.publishing import ScoresPublished
from tests.service import working
from tests.service.advancing import close_overdue
from tests.service.replay.attribution.replaying import replay, start
from tests.service.sending import Sender, make_batch, problem_of, start_run

Values = NDArray[np.float32]
CHAIN = ["vllm.prefill", "torch.trainer"]


def k3_of(target: Values, behaviour: Values) -> float:
    """The mean of ρ − 1 − d in float64, straight from the formula."""
    d = target.astype(np.float64) - behaviour.astype(np.float64)
    return float(np.mean(np.expm1(d) - d))


def test_links_add_up_to_the_whole_and_equal_the_formulas(http: httpx.Client) -> None:
    batch = make_batch(12)
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    run = start(http, batch)
    prefill, trainer = working.noisy(batch, 1, 0.01), working.noisy(batch, 2, 0.03)
    replay(run, {"vllm.prefill": prefill, "torch.trainer": trainer}, batch)

    read = run.get("steps/1/attribution").json()
    assert read["chain"] == ["rollout", "vllm.prefill", "torch.trainer", "trainer"]
    assert read["missing"] == ["vllm.decode"]
    names = ["vllm.prefill/rollout", "torch.trainer/vllm.prefill", "trainer/torch.trainer"]
    assert [link["name"] for link in read["links"]] == names
    steps = [batch.rollout_log_probs, prefill, trainer, batch.trainer_log_probs]
    for link, behaviour, target in zip(read["links"], steps[:-1], steps[1:], strict=True):
        assert link["k3_kl"] == pytest.approx(k3_of(target, behaviour), rel=1e-9)
    assert read["whole"]["name"] == "trainer/rollout"
    assert read["whole"]["k3_kl"] == pytest.approx(k3_of(steps[-1], steps[0]), rel=1e-9)
    assert read["telescoping_error"] <= 1e-12
    assert sum(link["share"] for link in read["links"]) == pytest.approx(1, abs=1e-12)
    d = steps[-1].astype(np.float64) - steps[0]
    shares = [np.sum((b.astype(np.float64) - a) * d) / np.sum(d * d) for a, b in itertools.pairwise(steps)]
    assert [link["share"] for link in read["links"]] == pytest.approx(shares, rel=1e-9)
    assert (read["rollouts"], read["of_rollouts"], read["from_sample"]) == (12, 12, False)
    assert read["side_branch"] is None
    assert {source["scorer"] for source in read["scores"]} == {"vllm.prefill", "torch.trainer"}


def test_replayed_comparisons_become_measurements(http: httpx.Client) -> None:
    batch = make_batch(10)
    run = start(http, batch)
    before = run.get("measurements", comparison="trainer/rollout").json()
    prefill = working.noisy(batch, 1)
    replay(run, {"vllm.prefill": prefill, "torch.trainer": working.noisy(batch, 2)}, batch)
    columns = run.get("measurements").json()["columns"]
    assert set(columns["comparison"]) == {
        "rollout",
        "trainer/rollout",
        "vllm.prefill/rollout",
        "torch.trainer/vllm.prefill",
        "trainer/torch.trainer",
        # Any two scores of the chain, so that it does not matter which job is done first.
        "torch.trainer/rollout",
        "trainer/vllm.prefill",
    }
    row = columns["comparison"].index("vllm.prefill/rollout")
    assert batch.rollout_log_probs is not None
    assert columns["k3_kl"][row] == pytest.approx(k3_of(prefill, batch.rollout_log_probs), rel=1e-9)
    assert columns["from_sample"][row] is False
    # What the step's own shards measured stays what it was.
    assert run.get("measurements", comparison="trainer/rollout").json() == before
    buckets = run.get("steps/1/buckets", comparison="vllm.prefill/rollout").json()
    assert sum(buckets["columns"]["tokens"]) == batch.num_tokens


def test_scores_of_two_probes_join_in_one_chain(http: httpx.Client) -> None:
    batch = make_batch(6)
    run = start(http, batch)
    replay(run, {"vllm.prefill": working.noisy(batch, 1)}, batch)
    first = run.get("steps/1/attribution").json()
    assert first["chain"] == ["rollout", "vllm.prefill", "trainer"]
    assert first["links"][1]["cause"].startswith("numerics between engine and trainer or trainer against replay: ")
    assert "not told apart" in first["links"][1]["cause"]
    replay(run, {"torch.trainer": working.noisy(batch, 2)}, batch)
    assert run.get("steps/1/attribution").json()["chain"] == ["rollout", *CHAIN, "trainer"]


@pytest.mark.parametrize("as_statistics", [False, True])
def test_sample_is_marked_as_one(http: httpx.Client, as_statistics: bool) -> None:
    batch = make_batch(40)
    if as_statistics:
        run = start_run(http)
        body = encode_statistics_shard(batch, seed="a", full=FullRollouts(10, 3))
        run.put_statistics(1, body).raise_for_status()
        working.announce_checkpoint(run, 1)
        batch = decode_rollouts(StatisticsShard.from_bytes(body).full).select(range(10))
    else:
        run = start(http, batch)
    replay(
        run, {"vllm.prefill": working.noisy(batch, 1), "torch.trainer": working.noisy(batch, 2)}, batch, max_rollouts=10
    )
    read = run.get("steps/1/attribution").json()
    assert (read["rollouts"], read["of_rollouts"], read["from_sample"]) == (10, 40, True)
    columns = run.get("measurements").json()["columns"]
    sampled = dict(zip(columns["comparison"], columns["from_sample"], strict=True))
    # What the run logged itself is measured over all tokens, also if they came as statistics.
    assert (sampled["vllm.prefill/rollout"], sampled["trainer/rollout"]) == (True, False)
    rollouts = dict(zip(columns["comparison"], columns["rollouts"], strict=True))
    assert (rollouts["vllm.prefill/rollout"], rollouts["trainer/rollout"]) == (10, 40)


def test_moments_are_over_the_rollouts_that_all_scores_share(http: httpx.Client) -> None:
    batch = make_batch(20)
    run = start(http, batch)
    prefill, trainer = working.noisy(batch, 1), working.noisy(batch, 2)
    replay(run, {"vllm.prefill": prefill}, batch)
    replay(run, {"torch.trainer": trainer}, batch, max_rollouts=5)
    read = run.get("steps/1/attribution").json()
    assert read["rollouts"] == 5
    assert read["telescoping_error"] <= 1e-12
    # A later sample made in the same way does not hide the whole.
    replay(run, {"vllm.prefill": prefill}, batch, max_rollouts=2)
    assert run.get("steps/1/attribution").json()["rollouts"] == 5


def test_the_noise_floor_is_halved_and_never_clamped(http: httpx.Client) -> None:
    batch = make_batch(30)
    assert batch.rollout_log_probs is not None
    run = start(http, batch)
    prefill, trainer = working.noisy(batch, 1, 0.02), working.noisy(batch, 2, 0.02)
    again = np.minimum(prefill + np.float32(0.5), 0).astype(np.float32)
    third = np.minimum(trainer - np.float32(0.25), 0).astype(np.float32)
    replay(
        run,
        {
            "vllm.prefill": prefill,
            "vllm.prefill@rebatched": again,
            "torch.trainer": trainer,
            "torch.trainer@rebatched": third,
        },
        batch,
    )
    read = run.get("steps/1/attribution").json()
    assert read["chain"] == ["rollout", *CHAIN, "trainer"]
    floors = {floor["scorer"]: floor["k3_kl"] for floor in read["floors"]}
    assert floors["vllm.prefill"] == pytest.approx(k3_of(again, prefill), rel=1e-9)
    assert {floor["comparison"] for floor in read["floors"]} == {
        "vllm.prefill@rebatched/vllm.prefill",
        "torch.trainer@rebatched/torch.trainer",
    }
    halves = 0.5 * floors["vllm.prefill"] + 0.5 * floors["torch.trainer"]
    assert read["whole"]["excess_k3_kl"] == pytest.approx(read["whole"]["k3_kl"] - halves, rel=1e-9)
    link = read["links"][1]
    assert link["excess_k3_kl"] == pytest.approx(link["k3_kl"] - halves, rel=1e-9)
    assert link["excess_k3_kl"] < 0
    columns = run.get("measurements", measure="k3_kl").json()["columns"]
    values = dict(zip(columns["comparison"], columns["k3_kl"], strict=True))
    assert values["vllm.prefill@rebatched/vllm.prefill"] == pytest.approx(floors["vllm.prefill"], rel=1e-12)


def test_step_without_published_scores_is_not_found(http: httpx.Client) -> None:
    run = start(http, make_batch(4))
    answer = run.get("steps/1/attribution")
    assert problem_of(answer) == (404, "attribution-not-found")
    working.ask_for_probe(run, 1).raise_for_status()
    working.take_lease(http)
    assert run.get("steps/1/attribution").status_code == 404
    assert run.get("steps/9/attribution").status_code == 404


def test_late_rollouts_make_the_attribution_stale(sender: Sender, app: FastAPI) -> None:
    batch = make_batch(6)
    sender.put_shard(1, batch, shards=2).raise_for_status()
    close_overdue(app.state.context)
    working.announce_checkpoint(sender, 1)
    replay(sender, {"vllm.prefill": working.noisy(batch, 1), "torch.trainer": working.noisy(batch, 2)}, batch)
    before = sender.get("steps/1/attribution").json()
    assert (before["rollouts"], before["of_rollouts"], before["from_sample"]) == (6, 6, False)
    sender.put_shard(1, make_batch(4, seed=9), shard=1, shards=2).raise_for_status()
    # Reading computes nothing: until the worker has, it gives what is stored.
    assert sender.get("steps/1/attribution").json() == {**before, "stale": True, "incomplete": None}
    assert compute_stale_attributions(app.state.context) == 1
    after = sender.get("steps/1/attribution").json()
    assert (before["stale"], after["stale"]) == (False, False)
    assert (after["rollouts"], after["of_rollouts"], after["from_sample"]) == (6, 10, True)
    assert after["links"] == before["links"]
    assert sender.get("measurements", comparison="vllm.prefill/rollout").json()["columns"]["from_sample"] == [True]


def test_without_log_probs_of_the_trainer_the_chain_is_shorter_or_absent(http: httpx.Client) -> None:
    partial = dataclasses.replace(make_batch(4), trainer_log_probs=None)
    run = start(http, partial)
    replay(run, {"torch.float32": working.noisy(partial, 1)}, partial)
    answer = run.get("steps/1/attribution")
    assert problem_of(answer) == (404, "attribution-not-possible")
    assert "the scores of step 1 (torch.float32)" in answer.json()["detail"]
    replay(run, {"vllm.prefill": working.noisy(partial, 1)}, partial)
    assert run.get("steps/1/attribution").json()["chain"] == ["rollout", "vllm.prefill"]


def test_reading_never_writes(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(6)
    run = start(http, batch)
    probe = working.ask_for_probe(run, 1, CHAIN).raise_for_status().json()["id"]
    assert working.work_off(http) == 2
    context: ServiceContext = app.state.context
    context.database.write(lambda session: mark_attribution_stale(session, ScoresPublished(run.run, 1, 1)))

    def refuse(work: object) -> None:
        raise AssertionError(f"a GET wrote to the database: {work}")

    monkeypatch.setattr(context.database, "write", refuse)
    assert run.get("steps/1/attribution").json()["stale"] is True
    for path in (f"/v1/runs/{run.run}/probes", f"/v1/probes/{probe}", "/v1/hardware", "/metrics"):
        http.get(path).raise_for_status()
    for path in ("figures/attribution.json", "steps/1/figures/attribution.json"):
        http.get(f"/pages/runs/{run.run}/{path}").raise_for_status()
    http.get(f"/runs/{run.run}/steps/1").raise_for_status()


def test_worker_computes_what_a_crash_left(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(http, make_batch(6))
    working.ask_for_probe(run, 1, CHAIN).raise_for_status()
    with monkeypatch.context() as patched:
        # The process dies between the commit of the scores and the computation.
        patched.setattr("foreshock_service.replay.attribution.service.try_to_compute", lambda *_: False)
        assert working.work_off(http) == 2
    pending = run.get("steps/1/attribution")
    assert problem_of(pending) == (503, "attribution-pending")
    assert pending.headers["Retry-After"] == "5"
    with Reader(str(http.base_url), retry_seconds=0.0) as reader:
        assert wait_for_attribution(reader, run.run, 1, timeout_seconds=0.0) is None
    figure = http.get(f"/pages/runs/{run.run}/figures/attribution.json").json()
    assert figure["missing"] == "The attribution of step 1 is being computed: retry in 5 s."
    assert run.get("measurements", comparison="vllm.prefill/rollout").json()["columns"]["step"] == []
    context: ServiceContext = app.state.context
    assert compute_stale_attributions(context) == 1
    assert compute_stale_attributions(context) == 0
    assert run.get("measurements", comparison="vllm.prefill/rollout").json()["columns"]["step"] == [1]
    assert run.get("steps/1/attribution").json()["chain"] == ["rollout", *CHAIN, "trainer"]
