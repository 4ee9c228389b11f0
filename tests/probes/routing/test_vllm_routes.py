"""vLLM's routes, recorded in a real engine, agree with torch's in float32 and are those of its log-probs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.digests import weights_digest
from foreshock.rollouts import decode_scores
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.routing.recorded import PART, compare_routes, read_routes
from foreshock_probes.routing.vllm_routes import record, routers_of
from foreshock_probes.scorers.request import ScoreRequest, ScoreTask, UnsupportedScoreError, WarmModel
from tests.probes.replaying import Asked
from tests.probes.tiny import make_rollouts, save_mixture_of_experts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LAYERS = 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture_of_experts(tmp_path_factory.mktemp("experts"), seed=1, layers=LAYERS)


def test_routes_agree_with_torch_in_float32_and_less_in_bfloat16(tmp_path: Path, weights: Path) -> None:
    """vLLM in float32, with prompts in chunks, and in bfloat16."""
    rollouts, float32 = make_rollouts(30), {"dtype": "float32"}
    asked = {
        "torch": Asked(rollouts, weights, "torch.float32"),
        "exact": Asked(rollouts, weights, "vllm.prefill", options=float32),
        "chunked": Asked(rollouts, weights, "vllm.prefill", options={**float32, "max_num_batched_tokens": 16}),
        "coarse": Asked(rollouts, weights, "vllm.prefill"),
    }
    tasks = [each.task(tmp_path, name, function=PART) for name, each in asked.items()]
    alone = Asked(rollouts, weights, "vllm.prefill", options={**float32, "batch_size": 1}).task(tmp_path, "alone")

    def read(task: ScoreTask) -> Any:
        return decode_scores(task.result.read_bytes()) if task.function is None else read_routes(task.result)

    of_torch, exact, scores, chunked, coarse = run_tasks([*tasks[:2], alone, *tasks[2:]], read, tmp_path).results
    assert exact.layers == tuple(range(LAYERS))
    found = compare_routes(rollouts, of_torch, exact, ("torch.float32", "vllm.prefill")).measures
    assert [each.agreement.mean for each in found.layers] == [1.0] * LAYERS
    assert (found.all_tokens.tokens, found.excluded) == (rollouts.num_tokens, 0)
    assert found.all_tokens.abs_d.mean < 1e-5
    np.testing.assert_array_equal(exact.log_probs, scores.log_probs)
    assert exact.fingerprint == scores.fingerprint
    np.testing.assert_array_equal(np.sort(exact.experts, axis=2), np.sort(chunked.experts, axis=2))
    found = compare_routes(rollouts, of_torch, coarse, ("torch.float32", "vllm.prefill")).measures
    assert 0.0 < found.any_difference.mean < 1.0
    assert found.differing.abs_d.mean > found.agreeing.abs_d.mean > 0.0


def test_dense_model_and_noise_floor_are_refused(weights: Path) -> None:
    with pytest.raises(UnsupportedScoreError, match="vLLM's Linear has no routed experts"):
        routers_of(torch.nn.Linear(1, 1))
    request = ScoreRequest("vllm.prefill", "rebatched", make_rollouts(3), weights, weights_digest(weights))
    with pytest.raises(UnsupportedScoreError, match="no variant 'rebatched'"):
        record(request, WarmModel(), lambda tokens: None)
