"""Comparisons of routed experts over HTTP: requested, sent by a worker, published with their job, read by step."""

from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.api.records import parse, to_json
from foreshock.fingerprint import Fingerprint
from foreshock.measures.routing import measure_routing
from foreshock.probe_kinds import ROUTING
from foreshock.routing import MOST_LAYERS, RoutingComparison
from tests.service.sending import Sender, make_batch, problem_of
from tests.service.working import EVERYTHING, STEP, WEIGHTS, announce_checkpoint, take_lease

ABLE = (*EVERYTHING, ROUTING.capability)


def ask(run: Sender, *scorers: str, **fields: Any) -> httpx.Response:
    """Request a comparison; a scorer is written `name` or `name@variant`."""
    named = [dict(zip(("scorer", "variant"), name.partition("@")[::2], strict=True)) for name in scorers]
    body = {"step": STEP, "kind": "routing", "scorers": named, **fields}
    return run.http.post(f"/v1/runs/{run.run}/probes", json=body)


def comparison(seed: int = 0, target: str = "torch.trainer", behaviour: str = "vllm.prefill") -> dict[str, Any]:
    """Return a comparison of random routes of 12 rollouts of 5 tokens: 3 layers, 2 of 8 experts."""
    random = np.random.default_rng(seed)
    pi, mu = (random.random((60, 3, 8)).argsort(axis=2)[:, :, :2] for _ in range(2))
    log_pi, log_mu = (-random.exponential(1.0, 60) for _ in range(2))
    groups = np.arange(12).tolist()
    measures = measure_routing(pi, mu, log_pi, log_mu, np.arange(13) * 5, group_ids=groups, layers=[1, 2, 5])
    made, by = (Fingerprint(engine=name.partition(".")[0], weights_digest=WEIGHTS) for name in (target, behaviour))
    return to_json(
        RoutingComparison(
            target=target, behaviour=behaviour, target_fingerprint=made.to_dict(), behaviour_fingerprint=by.to_dict(),
            measures=measures,
        )
    )  # fmt: skip


def test_comparison_is_one_job_of_two_scorers_in_the_requested_order(run: Sender, http: httpx.Client) -> None:
    probe = ask(run).raise_for_status().json()
    assert [(job["engine"], len(job["scorers"])) for job in probe["jobs"]] == [("routing", 2)]
    job = take_lease(http, scorers=ABLE).lease["job"]
    assert job["kind"] == "routing"
    assert [each["scorer"] for each in job["scorers"]] == ["torch.trainer", "vllm.prefill"]
    turned = ask(run, "vllm.prefill", "torch.trainer").raise_for_status().json()
    assert turned["id"] != probe["id"]
    assert [each["scorer"] for each in turned["scorers"]] == ["vllm.prefill", "torch.trainer"]
    # Also with the default spelt out, a request is the same probe.
    assert ask(run, "torch.trainer", "vllm.prefill").json()["id"] == probe["id"]


def test_published_comparison_is_read(run: Sender, http: httpx.Client) -> None:
    assert problem_of(run.get(f"steps/{STEP}/routing")) == (404, "result-not-found")
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    sent = comparison(1)
    holder.put_document(comparison(0)).raise_for_status()
    holder.put_document(sent).raise_for_status()
    holder.complete().raise_for_status()
    read = run.get(f"steps/{STEP}/routing").raise_for_status().json()
    assert (read["run"], read["attempt"], read["step"]) == (run.run, 1, STEP)
    (item,) = read["items"]
    assert (item["rollouts"], item["from_sample"]) == (12, False)
    assert to_json(parse(RoutingComparison, item)) == sent
    assert [each["layer"] for each in item["measures"]["layers"]] == [1, 2, 5]


def test_newest_comparison_of_each_pair_is_shown(run: Sender, http: httpx.Client) -> None:
    pairs = [("torch.trainer", "vllm.prefill"), ("torch.float32@rebatched", "torch.float32")]
    for seed, (pair, rollouts) in enumerate([(pairs[0], 12), (pairs[1], 12), (pairs[0], 6)]):
        ask(run, *pair, max_rollouts=rollouts).raise_for_status()
        holder = take_lease(http, scorers=ABLE)
        holder.put_document(comparison(seed, *pair)).raise_for_status()
        holder.complete().raise_for_status()
    items = run.get(f"steps/{STEP}/routing").raise_for_status().json()["items"]
    assert [(each["target"], each["behaviour"], each["from_sample"]) for each in items] == [
        (*pairs[0], True),
        (*pairs[1], False),
    ]


def test_result_of_other_scorers_weights_or_form_is_refused(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    good = comparison()
    wrong_weights = {**good["target_fingerprint"], "weights_digest": "sha256:" + "cd" * 32}
    refused: list[dict[str, Any]] = [
        {"target": "torch.float32"},
        {"target": good["behaviour"], "behaviour": good["target"]},
        {"target_fingerprint": wrong_weights},
    ]
    for change in refused:
        assert problem_of(holder.put_document(good | change)) == (422, "result-not-asked"), change
    layers = good["measures"]["layers"]
    malformed: list[dict[str, Any]] = [
        {"layers": []},
        {"layers": layers[::-1]},
        {"layers": [layers[0] | {"layer": number} for number in range(MOST_LAYERS + 1)]},
        {"any_difference": good["measures"]["any_difference"] | {"mean": 1.5}},
    ]
    for change in malformed:
        assert holder.put_document(good | {"measures": good["measures"] | change}).status_code == 422, change


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_request_is_refused(run: Sender) -> None:
    pair = ("torch.trainer", "vllm.prefill")
    requests: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (pair[:1], {}),
        (("torch.trainer", "torch.float32", "vllm.prefill"), {}),
        (("torch.trainer", "torch.trainer"), {}),
        (("torch.trainer", "torch.own"), {}),
        (pair, {"exact_pairs": ["torch.trainer/vllm.prefill"]}),
        (pair, {"max_rollouts": 1025}),
    ]
    for scorers, fields in requests:
        assert ask(run, *scorers, **fields).status_code == 422, scorers


def test_sample_has_64_rollouts_by_default(run: Sender, http: httpx.Client) -> None:
    run.put_shard(4, make_batch(80, seed=9)).raise_for_status()
    announce_checkpoint(run, 4)
    probe = ask(run, step=4).raise_for_status().json()
    assert (probe["rollouts"], probe["from_sample"]) == (64, True)
