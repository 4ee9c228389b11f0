"""Weights of engines: reports in any order are judged, a wrong engine is an alert, a finding and a row of the page."""

import io
from collections.abc import Mapping
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from foreshock.client import deliveries
from foreshock.client.deliveries import Registration
from foreshock.errors import WeightsError
from foreshock.notary.compare import Holding
from foreshock.notary.pieces import Piece
from foreshock.notary.reports import METADATA_KEY, MOST_PIECES, encode_report
from foreshock_service.runs import weights
from tests.service.sending import Sender, start_run

NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def holding(step: int, **of_steps: int) -> Holding:
    """Return what is held of a step, with those tensors of other steps whose name has a part of this name."""
    steps = {name: next((other for part, other in of_steps.items() if part in name), step) for name in NAMES}
    pieces = {name: [Piece("bfloat16", 1000 * steps[name] + place, 4, 8)] for place, name in enumerate(NAMES)}
    return Holding(pieces)


def report(
    sender: Sender,
    step: int,
    trainer: Holding | None = None,
    engines: Mapping[str, Holding] | None = None,
    variants: Mapping[str, Any] | None = None,
) -> None:
    """Report what the client would."""
    registration = Registration({"project": "default", "key": "run"}, {"key": "first"})
    body = deliveries.weights(registration, step, trainer, engines or {}, variants or {}, 8).body
    put(sender, step, bytes(body)).raise_for_status()


def put(sender: Sender, step: int, body: bytes, **query: int) -> httpx.Response:
    path, query = f"/v1/runs/{sender.run}/steps/{step}/weights", {"attempt": sender.attempt, **query}
    return sender.http.put(path, params=query, content=body, headers={"Content-Type": deliveries.PARQUET})


def sentences(sender: Sender) -> list[str]:
    """Return what is said of the engines that hold other weights."""
    return [each["sentence"] for each in sender.items("weights") if not each["is_right"]]


def test_engine_with_an_old_tensor_is_named_alerted_and_resolved(sender: Sender) -> None:
    for step in range(7):
        engines = {str(engine): holding(step) for engine in range(8)}
        if step in (3, 4):
            engines["3"] = holding(step, lm_head=1)
        report(sender, step, holding(step), engines)
        sender.put_scalars(step, {"grad_norm": 1.0})
        if step == 4:
            (alert,) = sender.get("alerts").json()["items"]
            assert (alert["rule"], alert["step"], alert["state"], alert["value"]) == ("weights_differ", 3, "open", 1.0)
            diagnosis = sender.get("diagnosis").json()
            assert "Engine 3 of 8 holds step 4, except lm_head, which is of step 1" in diagnosis["headline"]
    expected = [f"Engine 3 of 8 holds step {step}, except lm_head, which is of step 1." for step in (3, 4)]
    assert sentences(sender) == expected
    (finding,) = sender.get("findings", source="notary").json()["items"]
    assert (finding["steps"], finding["first_step"], finding["newest_step"]) == (2, 3, 4)
    assert finding["sentence"] == expected[1]
    (alert,) = sender.get("alerts").json()["items"]
    assert alert["state"] == "resolved"


def test_reports_are_judged_in_any_order_and_again_when_they_are_repeated(sender: Sender) -> None:
    report(sender, 0, holding(0))
    report(sender, 1, engines={"a": holding(0)})
    assert sentences(sender) == []
    report(sender, 1, holding(1))
    assert sentences(sender) == ["Engine a of 8 holds step 0, while the trainer is at step 1."]
    report(sender, 1, engines={"a": holding(1)})
    assert sentences(sender) == []


def test_superseded_steps_are_no_history_and_their_finding_goes(sender: Sender) -> None:
    for step in range(3):
        report(sender, step, holding(step), {"0": holding(step, norm=0)})
    resumed = sender.new_attempt("second", 1)
    report(resumed, 1, holding(11), {"0": holding(11)})
    report(resumed, 2, holding(12), {"0": holding(2)})
    assert sentences(sender)[-1].startswith("Engine 0 of 8 holds weights that the trainer never announced")


def test_old_digests_are_forgotten_and_what_they_told_is_not(http: httpx.Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(weights, "KEPT_STEPS", 3)
    sender = start_run(http)
    for step in range(12):
        report(sender, step, holding(step), {"0": holding(step, lm_head=min(step, 2))})
    assert sentences(sender)[-1] == "Engine 0 of 8 holds step 11, except lm_head, which is of step 2."
    assert len(sentences(sender)) == 9


def test_variant_that_the_trainer_announced_is_named(sender: Sender) -> None:
    twice = {"lm_head.weight": holding(99).tensors["lm_head.weight"]}
    engines = {"0": holding(5, lm_head=99)}
    report(sender, 5, holding(5), engines, {"with the adapter applied twice": twice})
    assert sentences(sender) == ["Engine 0 of 8 holds step 5 with the adapter applied twice, as 1 of 3 tensors show."]


def test_answers_to_a_canary_prompt_are_compared(sender: Sender) -> None:
    answers = {step: [-0.1 * step - 0.01 * place for place in range(12)] for step in range(4)}
    for step, answer in answers.items():
        report(sender, step, Holding(canary=answer), {"0": Holding(canary=answers[min(step, 2)])})
    (sentence,) = sentences(sender)
    assert sentence.startswith("Engine 0 of 8 answers a canary prompt as step 2 does, while the trainer is at step 3")


def test_page_of_the_run_has_engines_by_steps(sender: Sender, http: httpx.Client) -> None:
    assert "Weights of" not in http.get(f"/runs/{sender.run}", follow_redirects=True).text
    for step in range(2):
        report(sender, step, holding(step), {"a": holding(step), "b": holding(step, lm_head=0)})
    page = http.get(f"/runs/{sender.run}", follow_redirects=True).text
    assert "Weights of 2 engines after step 1's sync: 1 holds others than the trainer's" in page.replace("&#39;", "'")
    assert "Engine b of 8 holds step 1, except lm_head, which is of step 0." in page


def test_wrong_reports_are_refused(sender: Sender) -> None:
    right = Piece("bfloat16", 1, 1, 1)
    for pieces in ([], [right._replace(rows=-1)], [right._replace(rows=1 << 48)], [right._replace(dtype="")]):
        body = encode_report({"trainer": {"tensors": {"w": pieces, "v": [right]}}}, 1)
        assert put(sender, 0, body).status_code == (204 if not pieces else 422)
    for holder in ("somebody", "engine:", "engine:\n"):
        body = encode_report({holder: {"tensors": {"w": [right]}}}, 1)
        assert put(sender, 0, body).status_code == 422
    good = encode_report({"trainer": {"tensors": {"w": [right]}}}, 1)
    assert put(sender, 0, good, attempt=7).status_code == 404
    table = pq.read_table(io.BytesIO(good))
    canary = b'{"engines_in_all": 1, "holders": {"trainer": {"canary": [%b]}}}'
    wrong = (b"[]", b'{"engines_in_all": 1, "holders": {}}', b"[" * 100_000, b'{"holders": {"trainer": 3}}')
    for metadata in (*wrong, *(canary % value for value in (b"NaN", b"Infinity", b'"x"'))):
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata}), sink)
        assert put(sender, 0, sink.getvalue()).status_code == 422
    assert put(sender, 0, b"no Parquet").status_code == 422


def test_mixture_of_experts_is_sent_and_judged(sender: Sender) -> None:
    """Qwen3-30B-A3B has 18,867 tensors, which are 2 MB of JSON."""
    names = [f"model.layers.{number // 400}.mlp.experts.{number % 400}.gate_proj.weight" for number in range(18_867)]
    held = {name: [Piece("bfloat16", 10**15 + place, 768, 1024)] for place, name in enumerate(names)}
    report(sender, 0, Holding(held), {"0": Holding(held)})
    other = {**held, names[7]: [Piece("bfloat16", 3, 768, 1024)]}
    report(sender, 1, Holding(held), {"0": Holding(other)})
    (sentence,) = sentences(sender)
    assert "Engine 0 of 8 holds step" in sentence
    assert "layers.0.mlp.experts.7" in sentence


def test_report_with_too_many_pieces_is_refused_where_it_is_made() -> None:
    pieces = [Piece("bfloat16", 1, 1, 1)] * (MOST_PIECES + 1)
    with pytest.raises(WeightsError, match=r"250,001 pieces of tensors, more than 250,000: report the engines in"):
        encode_report({"trainer": {"tensors": {"w": pieces}}}, 1)
