"""Queries as Grafana sends them, with its variables filled in."""

import re

SQL_VARIABLE = re.compile(r"\$\{(\w+):sqlstring\}")
RUN = re.compile(r"\$\{run:raw\}|\$run\b")


def filled(sql: str, run: str = "run_1") -> str:
    """Return the SQL as Grafana sends it: `${name:sqlstring}` becomes a quoted literal."""
    values = {"run": run, "comparison": "trainer/rollout"}
    return SQL_VARIABLE.sub(lambda match: "'" + values[match[1]].replace("'", "''") + "'", sql)


def filled_expression(expression: str, run: str) -> str:
    """Return the PromQL as Grafana sends it for one run, or for all of a dashboard of several."""
    return RUN.sub(run, expression).replace("$name", ".*")
