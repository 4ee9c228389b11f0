"""An exact pair in real engines: its values against distributions that the test computes itself, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foreshock.digests import weights_digest
from foreshock.measures.exact import measure_exact
from foreshock.rollouts import (
    BatchAttributes,
    ExactBatch,
    RolloutBatch,
    decode_exact,
    decode_scores,
    encode_rollouts,
)
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.engines.process import EngineError, EnginePool
from foreshock_probes.engines.protocol import ScoreCommand
from foreshock_probes.job_scoring import EXACT_PART
from foreshock_probes.scorers.forward_pass import load_model
from tests.probes.tiny import VOCABULARY, make_rollouts, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Float64 = NDArray[np.float64]
Chosen = Mapping[str, Mapping[str, Any]]
(PAIR,) = EXACT_PAIRS.values()
# The engine in float32, so that the test's own float32 forward pass has its distributions up to rounding.
FLOAT32_ENGINE: Chosen = {PAIR.behaviour: {"dtype": "float32"}}


class Runner:
    """Runs commands in engines that stay warm."""

    def __init__(self, pool: EnginePool, folder: Path, weights: Path) -> None:
        self._pool, self._folder, self._weights = pool, folder, weights
        self._result, self._states = folder / "result.parquet", folder / "states.safetensors"

    def score(self, scorer: str, rollouts: RolloutBatch, options: Chosen) -> NDArray[np.float32]:
        self._run(scorer, rollouts, options)
        return decode_scores(self._result.read_bytes()).log_probs

    def compare(self, rollouts: RolloutBatch, options: Chosen) -> ExactBatch:
        for scorer in (PAIR.target, PAIR.behaviour):
            arguments = {"pair": PAIR.key, "states": str(self._states)}
            self._run(scorer, rollouts, options, task=EXACT_PART, arguments=arguments)
        return decode_exact(self._result.read_bytes())

    def _run(self, scorer: str, rollouts: RolloutBatch, options: Chosen, **named: Any) -> None:
        given = self._folder / "rollouts.parquet"
        given.write_bytes(encode_rollouts(rollouts))
        command = ScoreCommand(
            scorer=scorer,
            variant="",
            weights_folder=str(self._weights),
            weights_digest=weights_digest(self._weights),
            weights_version=None,
            options=dict(options.get(scorer, {})),
            accelerator="cpu",
            rollouts=str(given),
            scores=str(self._result),
            **named,
        )
        self._pool.score(command, lambda tokens: None)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("exact") / "weights", seed=5)


@pytest.fixture(scope="module")
def runner(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Runner:
    return Runner(engines, tmp_path_factory.mktemp("pairs"), weights)


def own_log_probs(weights: Path, rollouts: RolloutBatch, divisor: Float64, autocast: torch.dtype | None) -> Float64:
    """Return log-probs over the vocabulary [T, V] of the test's own forward passes, row by row; NaN without a state."""
    model = load_model(weights, torch.float32, "sdpa", torch.device("cpu"))
    found = np.full((rollouts.num_tokens, VOCABULARY), np.nan)
    for row in range(rollouts.num_rollouts):
        prompt = rollouts.prompt_token_ids[slice(*rollouts.prompt_offsets[row : row + 2])]
        start, stop = rollouts.response_offsets[row : row + 2]
        ids = torch.from_numpy(np.concatenate([prompt, rollouts.response_token_ids[start:stop]]).astype(np.int64))
        if not ids.numel():
            continue
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / divisor[row]
        first = 1 if prompt.size == 0 else 0
        states = torch.log_softmax(logits, -1)[max(prompt.size - 1, 0) : ids.numel() - 1]
        found[start + first : stop] = states.numpy()
    return found


def check_against(exact: ExactBatch, target: Float64, behaviour: Float64, chosen: NDArray[np.int32]) -> None:
    """Compare divergences with the sums of the definitions; the two sides know μ up to the rounding of float32."""
    pi, mu, rows = np.exp(target), np.exp(behaviour), np.arange(chosen.size)
    expected = {
        "kl": (mu * (behaviour - target)).sum(1),
        "reverse_kl": (pi * (target - behaviour)).sum(1),
        "tv": 0.5 * np.abs(pi - mu).sum(1),
        "target_entropy": -(pi * target).sum(1),
        "behaviour_entropy": -(mu * behaviour).sum(1),
        "target_log_probs": target[rows, chosen],
        "behaviour_log_probs": behaviour[rows, chosen],
    }
    assert np.nanmean(expected["kl"]) > 1e-6
    for name, values in expected.items():
        found = getattr(exact, name).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(values), err_msg=name)
        np.testing.assert_allclose(found, values, rtol=0.02, atol=2e-5 if "kl" not in name else 2e-7, err_msg=name)
    known = ~np.isnan(expected["kl"])
    flips = target[known].argmax(1) != behaviour[known].argmax(1)
    np.testing.assert_array_equal(exact.top1_flip[known], flips)


def test_divergences_equal_the_definitions_and_log_probs_the_scorers(runner: Runner, weights: Path) -> None:
    rollouts = make_rollouts(24, seed=3)
    # One row a batch, as the test's own forward passes: bfloat16 products depend on the padding.
    options = {**FLOAT32_ENGINE, PAIR.target: {"batch_size": 1}}
    before = {name: runner.score(name, rollouts, options) for name in (PAIR.target, PAIR.behaviour)}
    exact = runner.compare(rollouts, options)
    ones = np.ones(rollouts.num_rollouts)
    target, behaviour = (own_log_probs(weights, rollouts, ones, each) for each in (torch.bfloat16, None))
    check_against(exact, target, behaviour, rollouts.response_token_ids)
    np.testing.assert_allclose(exact.target_log_probs, before[PAIR.target], atol=2e-6)
    np.testing.assert_allclose(exact.behaviour_log_probs, before[PAIR.behaviour], atol=2e-5)
    # The comparison leaves nothing behind in the engines.
    for name, values in before.items():
        np.testing.assert_array_equal(runner.score(name, rollouts, options), values)
    assert (exact.target_fingerprint.autocast, exact.behaviour_fingerprint.dtype) == ("bfloat16", "float32")
    assert exact.behaviour_fingerprint.batch_composition == "1 rows in order"


def test_temperatures_padding_on_the_left_and_rollouts_without_a_prompt(runner: Runner, weights: Path) -> None:
    random = np.random.default_rng(7)
    prompts = [random.integers(0, VOCABULARY, size).tolist() for size in (3, 0, 5, 1, 0)]
    responses = [random.integers(0, VOCABULARY, size).tolist() for size in (9, 6, 0, 12, 1)]
    temperature = np.array([1.0, 0.7, 1.0, 1.5, 0.7], dtype=np.float32)
    rollouts = RolloutBatch.from_lists(
        list("abcde"), prompts, responses, attributes=BatchAttributes(logprobs_mode="processed_logprobs"),
        temperature=temperature,
    )  # fmt: skip
    in_float32 = {"autocast": None, "master_dtype": "float32", "padding": "left"}
    options = {**FLOAT32_ENGINE, PAIR.target: {**in_float32, "temperature": 1.25}}
    exact = runner.compare(rollouts, options)
    target = own_log_probs(weights, rollouts, np.full(5, 1.25), None)
    behaviour = own_log_probs(weights, rollouts, temperature.astype(np.float64), None)
    check_against(exact, target, behaviour, rollouts.response_token_ids)
    assert int(np.isnan(exact.kl).sum()) == 2


def test_equal_precision_is_float32_rounding(runner: Runner) -> None:
    rollouts = make_rollouts(24, seed=3)
    options = {**FLOAT32_ENGINE, PAIR.target: {"autocast": None, "master_dtype": "float32"}}
    found = measure_exact(runner.compare(rollouts, options))
    assert found.kl.mean < 1e-10
    assert found.top1_flip.mean == 0.0


def test_sampled_estimates_agree_with_the_exact_kl(runner: Runner, weights: Path) -> None:
    rollouts = sampled_rollouts(weights, count=400, length=20)
    exact = runner.compare(rollouts, FLOAT32_ENGINE)
    d = exact.target_log_probs.astype(np.float64) - exact.behaviour_log_probs
    kl = exact.kl.astype(np.float64)
    for estimate in (-d, np.expm1(d) - d):
        # Means over rollouts, because the states of one are dependent.
        excess = (estimate - kl).reshape(400, 20).mean(1)
        assert abs(excess.mean()) < 4 * excess.std(ddof=1) / np.sqrt(400)
    found = measure_exact(exact, group_ids=[f"prompt-{row // 8}" for row in range(400)])
    assert found.k3_kl.low < found.kl.mean < found.k3_kl.high
    assert found.k3_kl.high - found.k3_kl.low < found.kl.mean
    assert found.kl.high - found.kl.low < found.k3_kl.high - found.k3_kl.low


def sampled_rollouts(weights: Path, count: int, length: int) -> RolloutBatch:
    """Return rollouts that the model samples in float32, whose distributions are the engine's in float32."""
    model = load_model(weights, torch.float32, "sdpa", torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (count, 4), generator=random)
    with torch.no_grad():
        for _ in range(length):
            probabilities = torch.softmax(model(input_ids=ids, use_cache=False).logits[:, -1].double(), -1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=random)], 1)
    names = [f"sampled-{row}" for row in range(count)]
    return RolloutBatch.from_lists(names, ids[:, :4].tolist(), ids[:, 4:].tolist())


def test_weights_that_are_not_numbers_give_states_that_are_not_finite(
    engines: EnginePool, tmp_path: Path, weights: Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "weights"
    broken.mkdir()
    (broken / "config.json").write_bytes((weights / "config.json").read_bytes())
    tensors = load_file(weights / "model.safetensors")
    tensors["lm_head.weight"][3] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    rollouts = make_rollouts(6, seed=3)
    exact = Runner(engines, tmp_path, broken).compare(rollouts, FLOAT32_ENGINE)
    found = measure_exact(exact)
    assert (found.tokens, found.non_finite) == (0, rollouts.num_tokens)
    assert np.isnan(exact.kl).all()
    assert not exact.top1_flip.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({PAIR.behaviour: {"tensor_parallel_size": 2}}, "tensor_parallel_size=1"),
        ({PAIR.behaviour: {"dtype": "float8"}}, "dtype"),
        ({PAIR.target: {"autocast": "float8"}}, "autocast"),
    ],
)
def test_settings_that_a_pair_cannot_have_are_refused_for_good(runner: Runner, options: Chosen, message: str) -> None:
    with pytest.raises(EngineError, match=message) as error:
        runner.compare(make_rollouts(3), options)
    assert error.value.kind == "final"
