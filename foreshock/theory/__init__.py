"""Bounds of the literature evaluated on a batch, with a note on each bound that is vacuous there.

`bounds.py` has the bounds on bias, `gradient.py` the gradient noise, `evaluate.py` both for one step.
"""

from __future__ import annotations

from foreshock.theory.bounds import (
    BiasBound,
    HorizonBound,
    SequenceChi2,
    bias_bound,
    horizon_bound,
    pinsker_bound,
    sequence_chi2,
)
from foreshock.theory.evaluate import Theory, evaluate_theory
from foreshock.theory.gradient import GradientNoise, GradientNorms, StepNoise, gradient_noise, step_noise

__all__ = [
    "BiasBound",
    "GradientNoise",
    "GradientNorms",
    "HorizonBound",
    "SequenceChi2",
    "StepNoise",
    "Theory",
    "bias_bound",
    "evaluate_theory",
    "gradient_noise",
    "horizon_bound",
    "pinsker_bound",
    "sequence_chi2",
    "step_noise",
]
