"""Corrections: what each would do to the rollouts of a step. Evaluated, never applied."""
