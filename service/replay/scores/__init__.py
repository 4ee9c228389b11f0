"""Scores: uploaded by workers, checked against the rollouts, and published when their job is complete."""
