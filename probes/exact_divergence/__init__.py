"""Exact divergences of two distributions over the whole vocabulary, which sampled estimators are held against."""

from __future__ import annotations

from probes.exact_divergence.result import ExactDivergences
from probes.exact_divergence.sources import GivenLogits, LogitSource, SourceError
from probes.exact_divergence.streaming import exact_divergences

__all__ = ["ExactDivergences", "GivenLogits", "LogitSource", "SourceError", "exact_divergences"]
