"""Scores: what workers upload, checked against the rollouts, and published when their job is complete."""
