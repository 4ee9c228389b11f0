"""Checkpoints that a run announced: the locations from which workers load weights."""
