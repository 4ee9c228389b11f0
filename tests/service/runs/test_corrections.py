"""Corrections of a step over HTTP: figures equal to the library's, and problems that name the invalid value."""

import math
from typing import Any

import httpx
import numpy as np
import pytest

from foreshock.rollouts import RolloutBatch
from tests.service.sending import Sender, log_probs_of, make_batch, start_run


def mismatched(seed: int) -> RolloutBatch:
    """Return a batch with advantages, and tokens beyond every usual threshold."""
    generator = np.random.default_rng(seed)
    behaviour, _ = log_probs_of(make_batch(16, seed))
    noise = generator.normal(0, 0.01, behaviour.size)
    noise[::5] = generator.normal(0, 2.5, noise[::5].size)
    target = np.minimum(behaviour + noise, 0.0).astype(np.float32)
    return make_batch(16, seed, trainer_log_probs=target, advantage=generator.normal(size=16).astype(np.float32))


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    """Start a run with one closed step of two shards."""
    sender = start_run(http)
    for shard in range(2):
        sender.put_shard(0, mismatched(shard), shard, 2).raise_for_status()
    return sender


def test_query_selects_correction_and_thresholds(sender: Sender) -> None:
    behaviour, target = log_probs_of(mismatched(0))
    d = target.astype(np.float64) - behaviour
    beside = math.exp(float(d[(d > 1.1) & (d < 1.5)][0]))
    query = {"correction": "token_mis", "threshold": ["2", "1e30", f"{beside:.6g}"]}
    two, far, near = sender.get("steps/0/corrections", **query).raise_for_status().json()["items"]
    assert (two["threshold"], two["threshold_used"], two["exact"], two["notes"]) == ("2", "2", True, [])
    assert (far["threshold"], far["threshold_used"], far["exact"], far["kept_tokens"]) == ("1e+30", "1e+30", True, 1.0)
    assert (near["threshold"], near["exact"]) == (f"{beside:.6g}", False)
    assert math.log(float(near["threshold_used"])) == pytest.approx(math.log(beside), rel=0.032)
    assert near["threshold_used"] in near["notes"][0]
    both = sender.get("steps/0/corrections", correction=["veto", "geo_mis"]).json()["items"]
    assert {item["correction"] for item in both} == {"veto", "geo_mis"}
    at_any = sender.get("steps/0/corrections", correction="geo_mis", threshold="0.97_1.013").json()["items"]
    assert (at_any[0]["threshold_used"], at_any[0]["exact"]) == ("0.97_1.013", True)


def test_invalid_query_is_refused(sender: Sender) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"correction": "token_tiss"}, "query.correction"),
        ({"correction": "token_tis", "threshold": "0.5"}, "expected one ratio of at least 1, such as 2, got 0.5"),
        ({"correction": "geo_mis", "threshold": "2_0.5"}, "an upper bound of at least 1"),
        ({"correction": "token_tis", "threshold": "many"}, "query.threshold"),
        ({"correction": "token_tis", "threshold": "1e999"}, "query.threshold"),
        ({"threshold": "2"}, "query.threshold"),
        ({"correction": ["token_tis", "veto"], "threshold": "2"}, "query.threshold"),
        ({"comparison": "rollout"}, "query.comparison"),
    ]
    for query, word in refusals:
        refused = sender.get("steps/0/corrections", **query)
        assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
        assert word in refused.json()["detail"]


def test_unmeasured_step_is_not_found(sender: Sender) -> None:
    missing = sender.get("steps/0/corrections", comparison="torch.trainer/trainer")
    assert missing.status_code == 404
    assert "trainer/rollout" in missing.json()["detail"]
    assert sender.get("steps/7/corrections").status_code == 404
    assert sender.get("steps/0/corrections", attempt=4).status_code == 404
    assert sender.http.get("/v1/runs/nobody/steps/0/corrections").status_code == 404
