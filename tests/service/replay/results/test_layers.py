"""Comparisons by layer over HTTP: what is requested, what a worker sends, when it counts, and what is shown of it."""

from typing import Any

import httpx
import pytest

from foreshock import layer_divergence
from foreshock.api.records import to_json
from foreshock.api.replays import MeanRecord
from foreshock.probe_kinds import LAYERS
from tests.service.sending import Sender, problem_of
from tests.service.working import EVERYTHING, STEP, WEIGHTS, take_lease

ABLE = (*EVERYTHING, LAYERS.capability)
PAIR = ("torch.trainer", "torch.float32")


def ask(run: Sender, *scorers: str, **fields: Any) -> httpx.Response:
    body = {"step": STEP, "kind": "layers", "scorers": [{"scorer": name} for name in scorers], **fields}
    return run.http.post(f"/v1/runs/{run.run}/probes", json=body)


def distance(mean: float) -> layer_divergence.Distance:
    return layer_divergence.Distance(MeanRecord(mean=mean, low=0.9 * mean, high=1.1 * mean), 2 * mean)


def found(*levels: float, **changes: Any) -> dict[str, Any]:
    """Return a worker's result: the distances of the places, with noise floors of 1e-7."""
    floor = distance(1e-7)
    layers = tuple(
        layer_divergence.compared_layer(name, distance(level), floor, floor)
        for name, level in zip(layer_divergence.names_of_places(len(levels) - 2), levels, strict=True)
    )
    prints = ({"engine": "torch", "dtype": "bfloat16", "weights_digest": WEIGHTS}, {"engine": "torch"})
    comparison = layer_divergence.LayerComparison(
        step=STEP, pair="/".join(PAIR), compared=PAIR[0], reference=PAIR[1], rollouts=12, groups=6, tokens=80,
        states=80, non_finite=0, departure=layer_divergence.departure_of(layers),
        sentence=layer_divergence.departure_in_words(layers, *PAIR, 6), layers=layers,
        compared_fingerprint=prints[0], reference_fingerprint=prints[1],
    )  # fmt: skip
    return to_json(comparison) | changes


DEPARTING = (1e-8, 1e-7, 1e-3, 4e-3)


def test_published_comparison_is_read(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    holder.put_document(found(*DEPARTING[::-1])).raise_for_status()
    holder.put_document(found(*DEPARTING)).raise_for_status()
    holder.complete().raise_for_status()
    read = run.get(f"steps/{STEP}/layers").raise_for_status().json()
    (item,) = read["items"]
    assert (read["attempt"], read["step"], item["pair"]) == (1, STEP, "/".join(PAIR))
    assert item["departure"] == "layers.1"
    assert item["sentence"].startswith("torch.trainer and torch.float32 depart first at layers.1: ")
    assert [layer["name"] for layer in item["layers"]] == ["embeddings", "layers.0", "layers.1", "norm"]
    assert [layer["departs"] for layer in item["layers"]] == [False, False, True, True]
    assert item["layers"][2]["distance"]["relative_l2"] == found(*DEPARTING)["layers"][2]["distance"]["relative_l2"]
    assert item["compared_fingerprint"]["dtype"] == "bfloat16"
    other = run.get(f"steps/{STEP}/layers", pair="torch.float32/torch.trainer")
    assert problem_of(other) == (404, "result-not-found")


def test_scores_are_not_asked_of_a_comparison(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    answer = holder.put_scores(b"", PAIR[0])
    assert problem_of(answer) == (422, "result-not-asked")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_result_is_refused(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    changes: list[dict[str, Any]] = [
        {"step": STEP + 1},
        {"compared": "torch.bfloat16"},
        {"compared": PAIR[1], "reference": PAIR[0]},
        {"compared_fingerprint": {"engine": "torch", "weights_digest": "sha256:" + "cd" * 32}},
        {"layers": []},
        {"layers": [{"name": "layers.7"}] * 3},
        {"states": "many"},
    ]
    for change in changes:
        answer = holder.put_document(found(*DEPARTING) | change)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), change
    body = found(*DEPARTING)
    body["layers"][1]["name"] = "layers.1"
    assert "layers must be embeddings, layers.0, … norm in this order" in holder.put_document(body).text


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_request_is_refused(run: Sender) -> None:
    refused: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("torch.trainer",), {}, "has two scorers"),
        (("torch.trainer", "torch.trainer"), {}, "named twice"),
        (("torch.trainer", "torch.own"), {}, "torch.own gives no hidden states to compare by layer"),
        (("torch.trainer", "no.such"), {}, "unknown scorer"),
        (PAIR, {"exact_pairs": ["torch.trainer/vllm.prefill"]}, "no exact pair"),
        (PAIR, {"scorers": [{"scorer": name, "variant": "rebatched"} for name in PAIR]}, "no variant"),
    ]
    for scorers, fields, message in refused:
        answer = ask(run, *scorers, **fields)
        assert (answer.status_code, message in answer.text) == (422, True), message
