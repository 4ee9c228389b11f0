"""Corrections of the training–inference mismatch: the effect of each on a batch, and the weights of those in use.

`catalogue.py` lists them; `Evaluator` says what each would do, and `weights` is what a loop multiplies its loss by.
"""

from foreshock.corrections.catalogue import CORRECTIONS, Bounds, Threshold, correction_named
from foreshock.corrections.evaluate import Evaluation, Evaluator
from foreshock.corrections.loss_weights import weights

__all__ = [
    "CORRECTIONS",
    "Bounds",
    "Evaluation",
    "Evaluator",
    "Threshold",
    "correction_named",
    "weights",
]
