"""Corrections of the training–inference mismatch: the effect of each on a batch. None is applied.

`catalogue.py` lists them; `evaluate.py` is the entry point. Token corrections are computed from the sums of a
comparison (`token_level.py`), sequence corrections from its rollout summaries (`sequence_level.py`).
"""

from foreshock.corrections.catalogue import (
    CORRECTIONS,
    Bounds,
    Evaluation,
    Threshold,
    correction_named,
)
from foreshock.corrections.evaluate import Evaluator
from foreshock.corrections.sequence_level import ExactKl

__all__ = [
    "CORRECTIONS",
    "Bounds",
    "Evaluation",
    "Evaluator",
    "ExactKl",
    "Threshold",
    "correction_named",
]
