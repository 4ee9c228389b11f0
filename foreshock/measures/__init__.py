"""Measures of the mismatch between the sampling policy (μ) and the trained policy (π); `registry.py` lists them."""

from foreshock.api.attribution import LinkRecord as Link
from foreshock.measures.comparison import Comparison, StepMeasurement, compare, fold, measure_step
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.estimators.attribution import Attribution, attribute
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.registry import MEASURES, Measure, measure_named
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.conditions import BUCKET_EDGES, CONDITIONS, BucketTable, Condition
from foreshock.measures.statistics.token_ids import TokenIdTable
from foreshock.measures.step_statistics import StepStatistics

__all__ = [
    "BUCKET_EDGES",
    "CONDITIONS",
    "MEASURES",
    "Attribution",
    "BucketTable",
    "Comparison",
    "ComparisonStatistics",
    "Condition",
    "Interval",
    "Link",
    "Measure",
    "RolloutSummaries",
    "StepMeasurement",
    "StepStatistics",
    "TokenIdTable",
    "attribute",
    "compare",
    "fold",
    "measure_named",
    "measure_step",
]
