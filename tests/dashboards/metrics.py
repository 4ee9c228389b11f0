"""Metrics of the exporter, and those that no panel of the dashboards shows."""

import re

from dashboards.generate import dashboards
from foreshock_service.platform import health
from foreshock_service.present.exporter.families import FAMILIES, OF_COMPARISONS, OF_STEPS

LABELS: dict[str, set[str]] = {
    **{family.sample_name: set(family.labels) for family in FAMILIES},
    **{health.PREFIX + name: set() for name in health.GAUGES},
    **{name: {"job"} for name in (f"{health.JOB_RUNS}_total", f"{health.JOB_FAILURES}_total", health.JOB_LAST_RUN)},
}
METRIC = re.compile(r"foreshock_\w+")
REASONS = {
    "foreshock_kl_nats": "k1 is too noisy for one step; k3 estimates the same",
    "foreshock_response_length_p99_tokens": "the curves over steps show the 90th percentile and the largest",
    "foreshock_reward_collapsed": "for alerts: the panel of the verdicts has such a run as critical",
}
"""Metrics without a panel of their own -> why."""


def metrics_without_panel() -> set[str]:
    """Return the metrics that no panel and no variable asks Prometheus for, nor SQL as a column."""
    expressions, sql = _texts()
    live = {name for expression in expressions for name in METRIC.findall(expression)}
    columns = {**OF_COMPARISONS, **OF_STEPS}
    over_steps = {family.name for column, family in columns.items() if any(f'"{column}"' in each for each in sql)}
    return set(LABELS) - live - over_steps


def _texts() -> tuple[list[str], list[str]]:
    """Return every PromQL expression and every SQL query of panels and variables."""
    expressions, sql = [], []
    for dashboard in dashboards():
        document = dashboard.render()
        for panel in document["panels"]:
            for target in panel.get("targets", []):
                expressions += [target["expr"]] if "expr" in target else []
                sql += [target["rawSql"]] if "rawSql" in target else []
        for variable in document["templating"]["list"]:
            query = variable["query"]
            (sql if isinstance(query, str) else expressions).append(query if isinstance(query, str) else query["query"])
    return expressions, sql
