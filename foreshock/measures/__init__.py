"""Measures of the mismatch between the policy that sampled (μ) and the one that is trained (π); see `registry.py`."""

from __future__ import annotations

from foreshock.measures.attribution import CHAIN, Attribution, Link, attribute
from foreshock.measures.buckets import BUCKET_EDGES, BucketTable
from foreshock.measures.comparison import Comparison, StepMeasurement, compare, measure_step
from foreshock.measures.conditions import CONDITIONS, Condition
from foreshock.measures.folding import fold
from foreshock.measures.intervals import Interval
from foreshock.measures.registry import MEASURES, Measure, measure_named
from foreshock.measures.statistics import ComparisonStatistics
from foreshock.measures.step_statistics import StepStatistics
from foreshock.measures.summaries import RolloutSummaries
from foreshock.measures.token_ids import TokenIdTable

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
