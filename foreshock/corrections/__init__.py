"""Corrections of the training–inference mismatch, evaluated and not applied: what would each do to this batch?

`catalogue.py` says which there are; `evaluate.py` is the way in; token corrections come from the sums of a comparison
(`token_level.py`), sequence corrections from its rollout summaries (`sequence_level.py`).
"""

from __future__ import annotations

from foreshock.corrections.catalogue import CORRECTIONS, Correction, correction_named
from foreshock.corrections.evaluate import Evaluator, evaluate, evaluate_usual
from foreshock.corrections.exact_kl import ExactKl
from foreshock.corrections.results import Casualties, Evaluation, Population, WeightMoments
from foreshock.corrections.thresholds import Bounds, Threshold

__all__ = [
    "CORRECTIONS",
    "Bounds",
    "Casualties",
    "Correction",
    "Evaluation",
    "Evaluator",
    "ExactKl",
    "Population",
    "Threshold",
    "WeightMoments",
    "correction_named",
    "evaluate",
    "evaluate_usual",
]
