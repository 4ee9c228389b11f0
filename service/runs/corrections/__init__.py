"""Corrections: their effect on the rollouts of a step, evaluated and never applied."""
