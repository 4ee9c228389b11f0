"""vLLM's routes, recorded in a real engine, agree with torch's in float32 and are those of its log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreshock.digests import weights_digest
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock_probes.engines.process import EngineError, EnginePool
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.routing.recorded import PART, RecordedRoutes, compare_routes, read_routes
from tests.probes.replaying import Replayer
from tests.probes.tiny import make_rollouts, save_mixture_of_experts

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LAYERS = 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture_of_experts(tmp_path_factory.mktemp("experts"), seed=1, layers=LAYERS)


def record(
    engines: EnginePool,
    tmp_path: Path,
    folder: Path,
    rollouts: RolloutBatch,
    scorer: str,
    variant: str = "",
    **options: object,
) -> RecordedRoutes:
    given, routes = tmp_path / "rollouts.parquet", tmp_path / "routes.safetensors"
    given.write_bytes(encode_rollouts(rollouts))
    command = ScoreCommand(
        scorer=scorer,
        variant=variant,
        weights_folder=str(folder),
        weights_digest=weights_digest(folder),
        weights_version=None,
        options=dict(options),
        accelerator="cpu",
        rollouts=str(given),
        scores=str(tmp_path / "scores.parquet"),
        task=PART,
        arguments={"routes": str(routes)},
    )
    engines.score(command, lambda tokens: None)
    assert not (tmp_path / "scores.parquet").exists()
    return read_routes(routes)


def test_routes_agree_with_torch_in_float32_and_less_in_bfloat16(
    engines: EnginePool, replay: Replayer, tmp_path: Path, weights: Path
) -> None:
    rollouts = make_rollouts(30)
    torch_routes = record(engines, tmp_path, weights, rollouts, "torch.float32")
    coarse = record(engines, tmp_path, weights, rollouts, "vllm.prefill")
    alone, fingerprint = replay.score(rollouts, weights, "vllm.prefill", dtype="float32", batch_size=1)
    # Last: the next test uses the engine that has loaded it.
    exact = record(engines, tmp_path, weights, rollouts, "vllm.prefill", dtype="float32")
    assert exact.layers == tuple(range(LAYERS))
    found = compare_routes(rollouts, torch_routes, exact, ("torch.float32", "vllm.prefill")).measures
    assert [each.agreement.mean for each in found.layers] == [1.0] * LAYERS
    assert (found.all_tokens.tokens, found.excluded) == (rollouts.num_tokens, 0)
    assert found.all_tokens.abs_d.mean < 1e-5
    np.testing.assert_array_equal(exact.log_probs, alone)
    assert exact.fingerprint == fingerprint
    found = compare_routes(rollouts, torch_routes, coarse, ("torch.float32", "vllm.prefill")).measures
    assert 0.0 < found.any_difference.mean < 1.0
    assert found.differing.abs_d.mean > found.agreeing.abs_d.mean > 0.0


def test_chunks_of_a_prompt_are_recorded_in_order(engines: EnginePool, tmp_path: Path, weights: Path) -> None:
    rollouts = make_rollouts(12)
    whole = record(engines, tmp_path, weights, rollouts, "vllm.prefill", dtype="float32")
    parts = record(engines, tmp_path, weights, rollouts, "vllm.prefill", dtype="float32", max_num_batched_tokens=16)
    np.testing.assert_array_equal(np.sort(whole.experts, axis=2), np.sort(parts.experts, axis=2))


def test_dense_model_and_noise_floor_are_refused(
    engines: EnginePool, tmp_path: Path, checkpoints: Path, weights: Path
) -> None:
    with pytest.raises(EngineError, match="has no routed experts") as refused:
        record(engines, tmp_path, checkpoints / "first", make_rollouts(3), "vllm.prefill")
    assert refused.value.kind == "final"
    with pytest.raises(EngineError, match="no variant 'rebatched'"):
        record(engines, tmp_path, weights, make_rollouts(3), "vllm.prefill", "rebatched")
