"""The rules that every run is watched with, each with its texts and the source of its threshold.

To add a rule, add it to `mismatch_rules.py`, `sampling_rules.py` or `policy_rules.py`: alerts, pages, the exporter and
the API read all of it from the rule. Thresholds that are healthy ranges come from `foreshock.ranges`.
"""

from __future__ import annotations

from foreshock.early_warning.mismatch_rules import K3, mismatch_rules
from foreshock.early_warning.policy_rules import policy_rules
from foreshock.early_warning.sampling_rules import sampling_rules
from foreshock.early_warning.threshold_rule import ThresholdRule
from foreshock.model_kind import ModelKind

__all__ = ["K3", "default_rules"]


def default_rules(model_kind: ModelKind | None = None) -> tuple[ThresholdRule, ...]:
    """Return the rules for a kind of model; None (unknown) has the thresholds of a dense model."""
    return (*mismatch_rules(model_kind), *sampling_rules(model_kind), *policy_rules(model_kind))
