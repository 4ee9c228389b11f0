"""A trainer's forward pass against a real vLLM, with the corrections and bounds computed from the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.recorded_runs import shipped_run
from examples.tiny_rl.model import load_model
from foreshock.corrections import Evaluator, ExactKl, Threshold
from foreshock.measures.comparison import measure_step
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.theory import horizon_bound
from foreshock_probes.exact_divergence import ExactDivergences, LogitSource, SourceError
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution, exact_divergences_of_models
from foreshock_probes.exact_divergence.pairs import EngineDistribution
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.vllm_engine import BYTES_PER_LOGIT, VllmOptions
from tests.paths import RECORDED
from tests.probes.held import K3_ON_LOWER_CPU, HeldProcess

WEIGHTS = RECORDED / "checkpoints" / "step_0160"


def recorded() -> RolloutBatch:
    return decode_rollouts((RECORDED / "rollouts" / "step_0160.parquet").read_bytes())


def trainer_against_engine(rollouts: RolloutBatch) -> ExactDivergences:
    trainer = ModelDistribution(load_model(WEIGHTS), autocast=torch.bfloat16)
    # 32 tokens per engine step, so that most prompts come in two chunks.
    engine = EngineDistribution(WEIGHTS, VllmOptions(logits_bytes=32 * BYTES_PER_LOGIT * 16))
    return exact_divergences_of_models(trainer, engine, rollouts, batch_size=128)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_trainer_against_engine_agrees_with_logs_and_k3_and_feeds_corrections_and_bounds(recorder: HeldProcess) -> None:
    rollouts = recorded()
    exact = recorder.call(trainer_against_engine, rollouts)
    assert exact.tokens == rollouts.num_tokens
    assert rollouts.rollout_log_probs is not None
    assert rollouts.trainer_log_probs is not None
    assert exact.target_log_probs is not None
    assert exact.behaviour_log_probs is not None
    in_its_environment = recorder.stands_for(shipped_run().environment)
    for ours, logged in (
        (exact.behaviour_log_probs, rollouts.rollout_log_probs),
        (exact.target_log_probs, rollouts.trainer_log_probs),
    ):
        d = ours - logged
        assert np.abs(d).max() < 1e-5 if in_its_environment else np.mean(np.expm1(d) - d) < K3_ON_LOWER_CPU

    d = rollouts.trainer_log_probs.astype(np.float64) - rollouts.rollout_log_probs
    k3 = np.expm1(d) - d
    error = (k3 - exact.kl).std(ddof=1) / np.sqrt(k3.size)
    assert abs(k3.mean() - exact.kl.mean()) < 4.5 * error
    assert exact.kl.mean() > 1e-6

    comparison = measure_step(rollouts).comparisons["trainer/rollout"]
    of_rollouts = ExactKl.of_tokens(exact.kl, rollouts.response_offsets)
    evaluator = Evaluator(comparison.statistics, comparison.summaries, of_rollouts)
    middle = float(np.median(of_rollouts.largest))
    trusted = evaluator.evaluate("trm_max", Threshold(upper=middle))
    assert trusted.not_estimable is None
    assert trusted.kept_sequences == pytest.approx(np.mean(of_rollouts.largest <= middle))
    longest = float(np.diff(rollouts.response_offsets).max())
    bound = horizon_bound(longest, exact.delta_max)
    assert bound.not_estimable is None
    assert 0.0 < bound.value == pytest.approx(2 * exact.delta_max * longest**2)


def test_unsupported_options_and_weights_raise_before_the_engine_starts() -> None:
    rollouts = recorded()
    with pytest.raises(UnsupportedScoreError, match="tensor_parallel_size"):
        EngineDistribution(WEIGHTS, VllmOptions(tensor_parallel_size=2))
    with pytest.raises(UnsupportedScoreError, match="batch_size"):
        EngineDistribution(WEIGHTS, VllmOptions(batch_size=4))
    with pytest.raises(SourceError, match=rf"\[3, 9\].*\[{rollouts.num_tokens}, 16\]"):
        EngineDistribution(WEIGHTS).divergences(LogitSource(torch.zeros(3, 4), torch.zeros(9, 4)), rollouts, (1,))
    with pytest.raises(UnsupportedScoreError, match=r"config\.json"):
        EngineDistribution(RECORDED).divergences(LogitSource(torch.zeros(3, 4), torch.zeros(9, 4)), rollouts, (1,))


def test_rollouts_without_a_response_need_no_engine() -> None:
    nothing = RolloutBatch.from_lists(["a"], [[1, 2]], [[]])
    found = exact_divergences_of_models(ModelDistribution(load_model(WEIGHTS)), EngineDistribution(WEIGHTS), nothing)
    assert found.tokens == 0
    assert np.isnan(found.delta_max)


def test_token_outside_the_vocabulary_raises_before_the_engine_starts() -> None:
    rollouts = RolloutBatch.from_lists(["a"], [[1, 2]], [[3, 40_000]])
    source = LogitSource(torch.zeros(2, 4), torch.zeros(16, 4))
    with pytest.raises(UnsupportedScoreError, match="40000"):
        EngineDistribution(WEIGHTS).divergences(source, rollouts, (1,))
