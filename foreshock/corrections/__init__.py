"""Corrections of the training–inference mismatch: the effect of each on a batch. None is applied.

`catalogue.py` lists them; `evaluate.py` is the entry point.
"""

from foreshock.corrections.catalogue import CORRECTIONS, Bounds, Threshold, correction_named
from foreshock.corrections.evaluate import Evaluation, Evaluator
from foreshock.corrections.sequences import ExactKl

__all__ = [
    "CORRECTIONS",
    "Bounds",
    "Evaluation",
    "Evaluator",
    "ExactKl",
    "Threshold",
    "correction_named",
]
