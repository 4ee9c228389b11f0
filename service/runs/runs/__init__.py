"""Runs: one training job each."""
