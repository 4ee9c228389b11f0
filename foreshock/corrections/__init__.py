"""Corrections of the training–inference mismatch: the effect of each on a batch. None is applied.

`catalogue.py` lists them; `evaluate.py` is the entry point. Token corrections are computed from the sums of a
comparison (`token_level.py`), sequence corrections from its rollout summaries (`sequence_level.py`).
"""

from foreshock.api.steps import AffectedRecord as AffectedSequences
from foreshock.api.steps import PopulationRecord as Population
from foreshock.corrections.catalogue import (
    CORRECTIONS,
    Bounds,
    Correction,
    Evaluation,
    Threshold,
    WeightMoments,
    correction_named,
)
from foreshock.corrections.evaluate import Evaluator
from foreshock.corrections.sequence_level import ExactKl

__all__ = [
    "CORRECTIONS",
    "AffectedSequences",
    "Bounds",
    "Correction",
    "Evaluation",
    "Evaluator",
    "ExactKl",
    "Population",
    "Threshold",
    "WeightMoments",
    "correction_named",
]
