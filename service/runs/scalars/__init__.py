"""Scalars that a source (the trainer, an engine) reports for a step."""
