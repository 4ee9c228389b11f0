"""The configuration matrix: cells are probes, measured against the reference, kept out of the chain."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foreshock.measures.comparison import compare
from foreshock.rollouts import RolloutBatch, ScoreBatch
from foreshock.scorers import REFERENCE
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import LeaseHolder, announce_checkpoint, ask_for_lease, ask_for_probe, noisy, scores_of

SECONDS = {"torch.trainer": 0.5, REFERENCE: 2.0, "vllm.prefill": 0.25}
HEAD = {"head_dtype": "float32"}


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    sender = start_run(http)
    sender.put_shard(1, make_batch(24)).raise_for_status()
    announce_checkpoint(sender, 1)
    return sender


def ask(run: Sender, scorer: str, options: dict[str, Any] | None = None, **fields: Any) -> str:
    body = {"kind": "matrix", "options": {scorer: options} if options else {}, **fields}
    return str(ask_for_probe(run, 1, (scorer,), **body).raise_for_status().json()["id"])


def scores_in(rollouts: RolloutBatch, scorer: str, options: dict[str, Any]) -> ScoreBatch:
    """Return scores whose distance from the reference is less with a float32 head."""
    scale = 0.0 if scorer == REFERENCE else 0.005 if options.get("head_dtype") else 0.05
    values = noisy(rollouts, seed=len(scorer), scale=scale)
    made = scores_of(rollouts, values, engine=scorer.partition(".")[0], head_dtype=options.get("head_dtype"))
    return ScoreBatch(made.sample_ids, made.log_probs, made.offsets, made.fingerprint, SECONDS[scorer])


def work(run: Sender, **fields: Any) -> int:
    done = 0
    while (answer := ask_for_lease(run.http, **fields)).status_code == 200:
        holder, job = LeaseHolder(run.http, answer.json()), answer.json()["job"]
        (asked,) = job["scorers"]
        scores = scores_in(holder.rollouts(), asked["scorer"], job["options"].get(asked["scorer"], {}))
        holder.put_scores(scores, asked["scorer"]).raise_for_status()
        holder.complete().raise_for_status()
        done += 1
    return done


def matrix(run: Sender) -> dict[str, Any]:
    found: dict[str, Any] = run.get("steps/1/matrix").raise_for_status().json()
    return found


def test_each_cell_has_its_mismatch_to_the_reference_and_its_cost(run: Sender) -> None:
    reference, plain, head = ask(run, REFERENCE), ask(run, "torch.trainer"), ask(run, "torch.trainer", HEAD)
    assert [cell["state"] for cell in matrix(run)["cells"]] == ["queued"] * 3
    assert work(run) == 3
    read = matrix(run)
    assert [cell["probe"] for cell in read["cells"]] == [reference, plain, head]
    assert [cell["changed"] for cell in read["cells"]] == [{}, {}, HEAD]
    assert read["reference"] == reference
    assert read["cells"][0]["against_reference"] is None
    rollouts = make_batch(24)
    for cell, options in zip(read["cells"][1:], ({}, HEAD), strict=True):
        values = (scores_in(rollouts, REFERENCE, {}), scores_in(rollouts, "torch.trainer", options))
        expected = compare(rollouts, *(each.log_probs for each in values)).measures()
        against = cell["against_reference"]
        assert against["comparison"] == f"{REFERENCE}/torch.trainer"
        assert against["k3_kl"] == pytest.approx(expected["k3_kl"], rel=1e-9)
        assert against["low"] < against["k3_kl"] < against["high"]
        assert cell["seconds_per_token"] == pytest.approx(0.5 / rollouts.num_tokens)
        assert cell["hardware"] == "cpu, a CPU"
    (sentence,) = read["recommendations"]
    assert "head_dtype=float32 in torch.trainer" in sentence
    assert "+0%" in sentence


def test_engine_and_trainer_are_compared_in_every_combination(run: Sender) -> None:
    probes = {
        (scorer, bool(options)): ask(run, scorer, options)
        for scorer in ("vllm.prefill", "torch.trainer")
        for options in ({}, HEAD)
    }
    work(run)
    read = matrix(run)
    assert {(pair["trainer"], pair["engine"]) for pair in read["pairs"]} == {
        (probes["torch.trainer", trainer], probes["vllm.prefill", engine])
        for trainer in (False, True)
        for engine in (False, True)
    }
    (sentence,) = read["recommendations"]
    assert "head_dtype=float32 in vllm.prefill and head_dtype=float32 in torch.trainer" in sentence


def test_what_the_engine_cannot_do_is_shown_with_its_reason(run: Sender) -> None:
    ask(run, "vllm.prefill", {"kv_cache_dtype": "fp8"})
    ask(run, "vllm.prefill", accelerator="H100")
    holder = LeaseHolder(run.http, ask_for_lease(run.http).json())
    holder.fail("final", "vLLM cannot load the checkpoint: no FP8 KV cache on a CPU").raise_for_status()
    failed, waiting = matrix(run)["cells"]
    assert (failed["state"], failed["reason"]) == (
        "failed",
        "vLLM cannot load the checkpoint: no FP8 KV cache on a CPU",
    )
    assert waiting["state"] == "queued"
    assert waiting["hardware"] == "H100"
    assert "on H100" in waiting["reason"]


def test_cells_are_no_part_of_the_chain(run: Sender) -> None:
    ask_for_probe(run, 1, ("torch.trainer",)).raise_for_status()
    work(run)
    before = run.get("steps/1/attribution").raise_for_status().json()
    ask(run, "torch.trainer", HEAD)
    ask(run, REFERENCE)
    assert work(run) == 2
    assert run.get("steps/1/attribution").json() == before


def test_cells_over_other_rollouts_are_counted_and_left_out(run: Sender) -> None:
    ask(run, "torch.trainer", max_rollouts=5)
    newer = ask(run, "torch.trainer", max_rollouts=6)
    work(run)
    read = matrix(run)
    assert [cell["probe"] for cell in read["cells"]] == [newer]
    assert (read["rollouts"], read["other_cells"]) == (6, 1)


def test_cell_has_one_scorer_and_a_bounded_sample(run: Sender) -> None:
    for fields in ({"max_rollouts": 5000}, {"exact_pairs": ["torch.trainer/vllm.prefill"]}):
        assert ask_for_probe(run, 1, (REFERENCE,), kind="matrix", **fields).status_code == 422
    assert ask_for_probe(run, 1, (REFERENCE, "torch.trainer"), kind="matrix").status_code == 422
    assert ask_for_probe(run, 1, (f"{REFERENCE}@rebatched",), kind="matrix").status_code == 422


def test_step_without_matrix_is_404(run: Sender) -> None:
    answer = run.get("steps/1/matrix")
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("matrix-not-found")
