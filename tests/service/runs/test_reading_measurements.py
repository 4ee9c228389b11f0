"""Measurements in three formats, fewer points with every spike, and buckets."""

import csv
import io
from random import Random
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.measures import compare
from foreshock.measures.pooling import PooledMean
from foreshock.measures.registry import MEASURES
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.columnar import choose_format
from foreshock_service.platform.database.tables import NewestMeasurement
from foreshock_service.platform.problem import NotAcceptable
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.curves import CurveQuery, read_curves
from foreshock_service.runs.measurements import pooled_mismatch
from tests.service.sending import Sender, log_probs_of, make_batch, start_run


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    """Start a run with three closed steps."""
    sender = start_run(http)
    sender.put_steps(range(3))
    return sender


def test_three_formats_hold_equal_values(sender: Sender) -> None:
    query = {"comparison": "trainer/rollout", "measure": ["k3_kl", "tail(2)", "surprisal_z"]}
    columns = sender.get("measurements", **query).json()["columns"]
    assert list(columns) == ["step", "attempt", "comparison", "from_sample", "k3_kl", "tail_2", "surprisal_z"]
    assert columns["surprisal_z"] == [None, None, None]
    path = f"/v1/runs/{sender.run}/measurements"
    text = sender.http.get(path, params=query, headers={"Accept": "text/csv"})
    assert text.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(text.text)))
    assert [float(row["k3_kl"]) for row in rows] == columns["k3_kl"]
    assert {row["surprisal_z"] for row in rows} == {""}
    table = sender.http.get(path, params=query, headers={"Accept": "application/vnd.apache.parquet"})
    assert pq.read_table(io.BytesIO(table.content)).to_pydict() == columns
    for name, answer in (("csv", text), ("parquet", table)):
        same = sender.http.get(path, params={**query, "format": name}, headers={"Accept": "image/png"})
        assert (same.content, same.headers["content-type"]) == (answer.content, answer.headers["content-type"])
    assert sender.http.get(path, params={"format": "xml"}).status_code == 422
    refused = sender.http.get(path, headers={"Accept": "image/png"})
    assert (refused.status_code, refused.headers["content-type"]) == (406, "application/problem+json")


def test_accept_header_selects_format() -> None:
    for accept in ("", "*/*", "application/*"):
        assert choose_format(accept) == "application/json"
    for accept in ("text/*", "text/csv;q=0.5, image/png"):
        assert choose_format(accept) == "text/csv"


def test_unavailable_media_type_is_refused() -> None:
    with pytest.raises(NotAcceptable):
        choose_format("image/png")


def test_query_selects_comparisons_and_steps(sender: Sender) -> None:
    both = sender.get("measurements", measure="k3_kl").json()["columns"]
    assert both["comparison"] == ["rollout"] * 3 + ["trainer/rollout"] * 3
    comparisons = ["trainer/rollout", "torch.trainer/trainer"]
    assert sender.read("measurements", comparison=comparisons, from_step=1, to_step=1)["columns"]["step"] == [1]
    assert sender.get("measurements", from_step=2, to_step=1).status_code == 422


def test_measures_are_listed_with_explanations(sender: Sender) -> None:
    items = sender.http.get("/v1/measures").json()["items"]
    assert [item["name"] for item in items] == [measure.name for measure in MEASURES]
    assert set(sender.get("measurements").json()["columns"]) >= {item["column"] for item in items}


def test_downsampling_keeps_spike(http: httpx.Client) -> None:
    sender = start_run(http)
    for step in range(12):
        behaviour, target = log_probs_of(make_batch(4, seed=step))
        batch = make_batch(4, seed=step, trainer_log_probs=behaviour - 5 if step == 7 else target)
        sender.put_shard(step, batch).raise_for_status()
    query = {"comparison": "trainer/rollout", "measure": "k3_kl"}
    columns = sender.get("measurements", **query, max_points=4).json()["columns"]
    assert len(columns["step"]) <= 4
    assert 7 in columns["step"]


def test_steps_are_listed_in_pages(sender: Sender) -> None:
    page = sender.get("steps", limit=2).json()
    assert [item["step"] for item in page["items"]] == [0, 1]
    rest = sender.get("steps", limit=2, cursor=page["next_cursor"]).json()
    assert [item["step"] for item in rest["items"]] == [2]
    assert rest["next_cursor"] is None
    assert rest["items"][0] == {
        "step": 2, "attempt": 1, "shards": 1, "expected_shards": 1, "closed": True,
        "rollouts": 6, "tokens": make_batch(seed=2).num_tokens, "full_rollouts": 6, "coverage": "all tokens",
    }  # fmt: skip


def test_the_entity_tag_of_curves_changes_with_what_they_show_only(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(3, make_batch(seed=3)).raise_for_status()
    asked: list[dict[str, Any]] = [{}, {"max_points": 50}, {"format": "csv"}, {"measure": ["k3_kl"]}, {"to_step": 9}]
    tags = [sender.get("measurements", **each).headers["etag"] for each in asked]

    def known() -> list[int]:
        answers = [
            http.get(sender.get("measurements", **each).url, headers={"If-None-Match": tag})
            for each, tag in zip(asked, tags, strict=True)
        ]
        assert all(answer.content == b"" for answer in answers if answer.status_code == 304)
        return [answer.status_code for answer in answers]

    assert known() == [304] * len(asked)
    # Of a step in two shards: the first changes nothing that is shown, the second closes it.
    sender.put_shard(5, make_batch(seed=5), shard=0, shards=2).raise_for_status()
    assert known() == [304] * len(asked)
    sender.put_shard(5, make_batch(seed=6), shard=1, shards=2).raise_for_status()
    assert known() == [200] * len(asked)
    # A resume that hides steps changes them too.
    tags = [sender.get("measurements", **each).headers["etag"] for each in asked]
    sender.new_attempt("resumed", 5)
    assert known() == [200] * len(asked)


def k3_sums(batch: RolloutBatch) -> tuple[float, float]:
    behaviour, target = log_probs_of(batch)
    summaries = compare(batch, target, behaviour).summaries
    return float(summaries.column("sum_k3").sum()), float(summaries.column("n_tokens").sum())


def pooled(app: FastAPI, run: str) -> PooledMean | None:
    with app.state.context.database.read() as session:
        return pooled_mismatch(session, [run]).get(run)


def test_mean_is_over_the_tokens_of_the_newest_active_steps(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    assert pooled(app, run.run) is None
    batches = {step: make_batch(12, seed=step) for step in range(1, 13)}
    for step, batch in batches.items():
        run.put_shard(step, batch).raise_for_status()

    def mean(first: int, last: int) -> float:
        sums = np.array([k3_sums(batches[step]) for step in range(first, last + 1)])
        return float(sums[:, 0].sum() / sums[:, 1].sum())

    found = pooled(app, run.run)
    assert found is not None
    assert found.mean == pytest.approx(mean(3, 12), rel=1e-9)
    assert found.low < found.mean < found.high
    run.new_attempt("again", resume_step=9)
    after = pooled(app, run.run)
    assert after is not None
    assert after.mean == pytest.approx(mean(1, 8), rel=1e-9)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_similar_name_is_suggested(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    for path, problem, suggested in (
        ("measurements?measure=k3_lk", "unknown-measure", "k3_kl"),
        ("measurements?comparison=trainer/rollot", "unknown-comparison", "trainer/rollout"),
        ("steps/1/buckets?comparison=trainr/rollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/tokens?comparison=torch.float23/rollout", "unknown-comparison", "torch.float32/rollout"),
        ("steps/1/corrections?comparison=trainerrollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/theory?comparison=trainer/rollouts", "unknown-comparison", "trainer/rollout"),
    ):
        answer = http.get(f"/v1/runs/{sender.run}/{path}")
        assert answer.status_code == 422
        assert answer.json()["type"] == f"urn:foreshock:problem:{problem}"
        assert f"did you mean {suggested!r}?" in answer.json()["detail"]


def test_known_comparison_without_data_is_not_an_error_of_the_name(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    assert sender.get("measurements", comparison="torch.float32/vllm.prefill").json()["columns"]["step"] == []
    assert sender.get("steps/1/buckets", comparison="torch.float32/vllm.prefill@rebatched").status_code == 404


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_kept_equal_the_stored_ones_whatever_was_written(http: httpx.Client, seed: int) -> None:
    random, first = Random(seed), start_run(http)
    senders, opened = [first], list[tuple[Sender, int]]()
    known: set[tuple[int, int]] = set()

    def curves(**query: int) -> Any:
        asked = {"comparison": TRAINER_ROLLOUT, "measure": ["k3_kl", "tokens"]}
        return first.get("measurements", **asked, **query).raise_for_status().json()["columns"]

    def put(sender: Sender, step: int, shard: int = 0, shards: int = 1) -> None:
        batch = make_batch(seed=random.randrange(10**6), prefix=f"{sender.attempt}-{step}-{shard}")
        sender.put_shard(step, batch, shard, shards).raise_for_status()
        known.add((sender.attempt, step))

    for number in range(40):
        sender, step = random.choice(senders), random.randrange(30)
        action = random.choice(["newer step", "newer step", "any step", "first shard", "last shard", "resume"])
        if action == "newer step":
            put(senders[-1], 30 + number)
        elif action == "any step" and (sender.attempt, step) not in known:
            put(sender, step)
        elif action == "first shard" and (sender.attempt, step) not in known:
            put(sender, step, 0, 2)
            opened.append((sender, step))
        elif action == "last shard" and opened:
            put(*opened.pop(), 1, 2)
        elif action == "resume":
            body = {"key": f"{number}", "resume_step": step, "age_seconds": random.choice([0.0, 3600.0])}
            made = http.post(f"/v1/runs/{first.run}/attempts", json=body).raise_for_status().json()
            senders.append(Sender(http, first.run, made["attempt"]))
        # A range that ends is read from the database.
        assert curves() == curves(to_step=10**6) == curves(max_points=1000), (number, action)


def test_request_with_an_older_snapshot_does_not_spoil_what_is_kept(http: httpx.Client, app: FastAPI) -> None:
    first, context = start_run(http), app.state.context
    asked = {"comparison": TRAINER_ROLLOUT, "measure": "k3_kl"}
    first.put_steps(range(3))
    with context.database.read() as session:
        session.scalars(select(NewestMeasurement)).all()
        session.expunge_all()
        first.put_shard(3, make_batch(seed=3)).raise_for_status()
        assert first.get("measurements", **asked).json()["columns"]["step"] == [0, 1, 2, 3]
        query = CurveQuery(comparisons=(TRAINER_ROLLOUT,), measures=("k3_kl",))
        read_curves(session, context, UNRESTRICTED, first.run, query)
    first.put_shard(4, make_batch(seed=4)).raise_for_status()
    assert first.get("measurements", **asked).json()["columns"]["step"] == [0, 1, 2, 3, 4]
