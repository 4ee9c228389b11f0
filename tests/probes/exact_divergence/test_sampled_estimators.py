"""Sampled estimators against exact values: tokens drawn from μ, at the states of recorded rollouts of a tiny Qwen3.

Every mean must lie within a few standard errors of the exact value. If the logged log-probs do not belong to the
sampling distribution, the estimators must miss the exact value in the known way.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.model import load_model
from foreshock.measures import ComparisonStatistics
from foreshock.measures.estimators import token
from foreshock.rollouts import decode_rollouts
from foreshock_probes.scorers.tokens import sequence
from tests.paths import RECORDED
from tests.probes.exact_divergence.reference import by_definition

STATES, DRAWS = 400, 1500
# Beyond this many standard errors one of a few dozen means lies once in ten thousand runs; the seed is fixed besides.
ERRORS = 4.5

Float64 = NDArray[np.float64]


def states_of(model: Qwen3ForCausalLM, ids: torch.Tensor, dtype: torch.dtype, temperature: float) -> torch.Tensor:
    """Return float64 logits [states, V] of the states of the sequences `ids` [rows, time]."""
    with torch.no_grad():
        logits: torch.Tensor = model.to(dtype)(input_ids=ids, use_cache=False).logits
    return logits.flatten(0, 1).float().div(temperature).double()


@pytest.fixture(scope="module")
def contexts() -> torch.Tensor:
    """The first 10 tokens of 40 recorded rollouts, prompt and response, shape [40, 10]."""
    batch = decode_rollouts((RECORDED / "rollouts" / "step_0045.parquet").read_bytes())
    rows = [sequence(batch, row)[:10] for row in range(batch.num_rollouts)]
    return torch.tensor(np.stack([row for row in rows if row.size == 10][:40]), dtype=torch.int64)


@dataclass(frozen=True)
class Sampled:
    """Tokens drawn from a distribution, and their logged log-probs: [states, DRAWS] and [states]."""

    target: Float64
    behaviour: Float64
    entropy: Float64

    @property
    def d(self) -> Float64:
        return np.asarray(self.target - self.behaviour)

    @property
    def measures(self) -> dict[str, float]:
        count, draws = self.target.shape
        # Each state is a rollout, so that intervals and the surprisal test are clustered by what its draws share.
        return ComparisonStatistics.of(
            self.target.ravel(),
            self.behaviour.ravel(),
            np.arange(count + 1) * draws,
            entropy=np.repeat(self.entropy, draws),
        ).measures()

    def agrees(self, terms: Float64, exact: Float64) -> bool:
        """Return True if the means of `terms` [states, DRAWS] and `exact` [states] differ by at most ERRORS errors."""
        error = np.sqrt(terms.var(axis=1, ddof=1).sum() / DRAWS) / terms.shape[0]
        return bool(abs(terms.mean() - exact.mean()) <= ERRORS * error)


def draw(distribution: torch.Tensor, target: torch.Tensor, logged: torch.Tensor, seed: int = 0) -> Sampled:
    """Draw tokens of `distribution`; return their log-probs under `target` (π) and `logged` (μ), all logits [S, V]."""
    torch.manual_seed(seed)
    tokens = torch.multinomial(torch.softmax(distribution, -1), DRAWS, replacement=True)
    log_pi, log_mu = (torch.log_softmax(logits, -1) for logits in (target, logged))
    entropy = -torch.special.xlogy(log_mu.exp(), log_mu.exp()).sum(-1)
    return Sampled(log_pi.gather(1, tokens).numpy(), log_mu.gather(1, tokens).numpy(), entropy.numpy())


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Return the logits with −inf outside the smallest set of likeliest tokens with probability p."""
    distribution, order = torch.softmax(logits, -1).sort(-1, descending=True)
    outside = distribution.cumsum(-1) - distribution >= p
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)


def numerics_apart(contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """π in float32, μ in bfloat16: one checkpoint, a real mismatch of numerics."""
    target, behaviour = (load_model(RECORDED / "checkpoints" / "step_0045") for _ in range(2))
    return states_of(target, contexts, torch.float32, 1.5), states_of(behaviour, contexts, torch.bfloat16, 1.5)


@pytest.fixture(scope="module", params=["numerics", "temperature", "weights"])
def distributions(request: pytest.FixtureRequest, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """π and μ: a mismatch of numerics, of temperature, and policies some steps of training apart."""
    if request.param == "numerics":
        return numerics_apart(contexts)
    behaviour = load_model(RECORDED / "checkpoints" / "step_0045")
    target = load_model(RECORDED / "checkpoints" / ("step_0160" if request.param == "weights" else "step_0045"))
    warmer = 1.6 if request.param == "temperature" else 1.5
    return states_of(target, contexts, torch.float32, warmer), states_of(behaviour, contexts, torch.float32, 1.5)


def test_token_estimators_are_unbiased(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, behaviour = distributions
    truth, sampled = by_definition(target, behaviour), draw(behaviour, target, behaviour)
    d = sampled.d
    assert truth["kl"].mean() > 1e-6
    assert sampled.agrees(-d, truth["kl"])
    assert sampled.agrees(token.k3_kl(d), truth["kl"])
    assert sampled.agrees(token.tv_token(d), truth["tv"])
    assert sampled.agrees(token.chi2_token(d), truth["chi2"])
    assert sampled.agrees(token.reverse_chi2_token(d), truth["reverse_chi2"])
    assert sampled.agrees(np.exp(d), truth["mean_ratio"])
    assert sampled.agrees(np.exp(d) * d, truth["reverse_kl"])
    assert sampled.agrees(-sampled.behaviour, truth["behaviour_entropy"])


def test_comparison_measures_are_the_means_of_the_estimators(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, behaviour = distributions
    truth, sampled = by_definition(target, behaviour), draw(behaviour, target, behaviour)
    measures, d = sampled.measures, sampled.d
    for name, terms in {
        "kl": -d,
        "k3_kl": token.k3_kl(d),
        "chi2_token": token.chi2_token(d),
        "reverse_chi2_token": token.reverse_chi2_token(d),
        "tv_token": token.tv_token(d),
        "mean_ratio": np.exp(d),
    }.items():
        assert measures[name] == pytest.approx(terms.mean(), rel=1e-9), name
    # (Σρ)²/(N Σρ²) is 1/(1 + χ²) where E ρ = 1, over all states together.
    ratio, ess = np.exp(d), 1.0 / (1.0 + truth["chi2"].mean())
    error = np.sqrt(((ratio - 1.0) ** 2).var(axis=1, ddof=1).sum() / DRAWS) / STATES
    slack = ERRORS * error * ess**2 + ERRORS**2 * truth["chi2"].mean() / d.size
    assert measures["ess_token"] == pytest.approx(ess, abs=slack)
    assert abs(measures["surprisal_z"]) < ERRORS


def test_tail_asymmetry_is_a_difference_of_tails(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, behaviour = distributions
    sampled, threshold = draw(behaviour, target, behaviour), 1.0
    log_pi, log_mu = (torch.log_softmax(logits, -1) for logits in distributions)
    gap = (log_pi - log_mu).numpy()
    exact_asymmetry = (log_mu.exp().numpy() * (gap < -threshold) - log_pi.exp().numpy() * (gap > threshold)).sum(-1)
    terms = (sampled.d < -threshold) - np.exp(sampled.d) * (sampled.d > threshold)
    assert sampled.agrees(terms, exact_asymmetry)
    assert sampled.measures["tail_asymmetry_1"] == pytest.approx(terms.mean(), rel=1e-9, abs=1e-12)


def test_k3_misses_the_mass_outside_the_sampling_support(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Processed log-probs under top-p: KL(μ‖π) and E ρ < 1 are estimated, and E[k3] = KL − (1 − E ρ)."""
    target, behaviour = distributions[0], top_p(distributions[1], 0.9)
    truth, sampled = by_definition(target, behaviour), draw(behaviour, target, behaviour)
    d = sampled.d
    assert truth["mean_ratio"].mean() < 0.97
    assert sampled.agrees(-d, truth["kl"])
    assert sampled.agrees(np.exp(d), truth["mean_ratio"])
    assert sampled.agrees(token.k3_kl(d), truth["kl"] - (1.0 - truth["mean_ratio"]))
    assert not sampled.agrees(token.k3_kl(d), truth["kl"])
    assert sampled.agrees(token.tv_token(d), truth["tv"])
    assert np.isinf(truth["reverse_kl"]).any()
    assert abs(sampled.measures["surprisal_z"]) < ERRORS


@pytest.mark.parametrize("sampling", ["top-p 0.9", "temperature 0.8"])
def test_raw_log_probs_of_shaped_sampling_are_detected_by_surprisal_only(contexts: torch.Tensor, sampling: str) -> None:
    """The logged μ is not the sampling distribution: all ratios look healthy, only the surprisal test detects it."""
    target, raw = numerics_apart(contexts)
    distribution = top_p(raw, 0.9) if sampling == "top-p 0.9" else raw / 0.8
    truth, logged = by_definition(target, distribution), draw(distribution, target, raw)
    measures = logged.measures
    assert truth["kl"].mean() > 100 * abs(measures["kl"])
    assert truth["kl"].mean() > 100 * measures["k3_kl"]
    assert measures["mean_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert abs(measures["surprisal_z"]) > 2 * ERRORS
