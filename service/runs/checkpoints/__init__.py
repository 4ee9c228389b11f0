"""Checkpoints that a run announced: where workers find weights."""
