"""Exact divergences of two distributions over the whole vocabulary, the reference for sampled estimators.

`divergences` computes them for two `logit_sources`. `model_distribution` and `pairs` provide the logits of a model of
transformers and of vLLM at the states of real rollouts.
"""

from foreshock_probes.exact_divergence.divergences import ExactDivergences, exact_divergences
from foreshock_probes.exact_divergence.logit_sources import GivenLogits, LogitSource, SourceError
from foreshock_probes.exact_divergence.model_distribution import ModelDistribution

__all__ = [
    "ExactDivergences",
    "GivenLogits",
    "LogitSource",
    "ModelDistribution",
    "SourceError",
    "exact_divergences",
]
