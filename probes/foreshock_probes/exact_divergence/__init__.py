"""Exact divergences of two scorers over the whole vocabulary, the reference for sampled estimators."""
