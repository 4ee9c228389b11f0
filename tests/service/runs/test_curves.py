"""Names of measures and comparisons: unknown ones are refused with a suggestion on every endpoint."""

from __future__ import annotations

import httpx
import pytest

from tests.service.sending import make_batch, start_run


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("path", "problem", "suggested"),
    [
        ("measurements?measure=k3_lk", "unknown-measure", "k3_kl"),
        ("measurements?comparison=trainer/rollot", "unknown-comparison", "trainer/rollout"),
        ("steps/1/buckets?comparison=trainr/rollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/tokens?comparison=torch.float23/rollout", "unknown-comparison", "torch.float32/rollout"),
        ("steps/1/corrections?comparison=trainerrollout", "unknown-comparison", "trainer/rollout"),
        ("steps/1/theory?comparison=trainer/rollouts", "unknown-comparison", "trainer/rollout"),
    ],
)
def test_similar_name_is_suggested(http: httpx.Client, path: str, problem: str, suggested: str) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    answer = http.get(f"/v1/runs/{sender.run}/{path}")
    assert answer.status_code == 422
    assert answer.json()["type"] == f"urn:foreshock:problem:{problem}"
    assert f"did you mean {suggested!r}?" in answer.json()["detail"]


def test_known_comparison_without_data_is_not_an_error_of_the_name(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(1, make_batch()).raise_for_status()
    assert sender.get("measurements", comparison="torch.float32/vllm.prefill").json()["columns"]["step"] == []
    assert sender.get("steps/1/buckets", comparison="torch.float32/vllm.prefill@rebatched").status_code == 404
