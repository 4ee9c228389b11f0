"""Measures of the mismatch between the sampling policy (μ) and the trained policy (π); `registry.py` lists them."""

from foreshock.measures.comparison import Comparison, StepMeasurement, compare, fold, measure_step
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.estimators.attribution import attribute
from foreshock.measures.registry import MEASURES, measure_named
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.step_statistics import StepStatistics

__all__ = [
    "CONDITIONS",
    "MEASURES",
    "Comparison",
    "ComparisonStatistics",
    "RolloutSummaries",
    "StepMeasurement",
    "StepStatistics",
    "attribute",
    "compare",
    "fold",
    "measure_named",
    "measure_step",
]
