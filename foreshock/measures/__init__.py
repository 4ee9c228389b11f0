"""Measures of the mismatch between the policy that sampled (μ) and the one that is trained (π); see `registry.py`."""

from __future__ import annotations

from foreshock.measures.comparison import Comparison, StepMeasurement, compare, measure_step
from foreshock.measures.estimators.attribution import CHAIN, Attribution, Link, attribute
from foreshock.measures.estimators.intervals import Interval
from foreshock.measures.registry import MEASURES, Measure, measure_named
from foreshock.measures.statistics.buckets import BUCKET_EDGES, BucketTable
from foreshock.measures.statistics.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.conditions import CONDITIONS, Condition
from foreshock.measures.statistics.folding import fold
from foreshock.measures.statistics.rollout_summaries import RolloutSummaries
from foreshock.measures.statistics.step_statistics import StepStatistics
from foreshock.measures.statistics.token_ids import TokenIdTable

__all__ = [
    "BUCKET_EDGES",
    "CHAIN",
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
