"""Severities are `info`, `warning` and `critical` instead of `info`, `look` and `bad`; rules are named after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0006'
down_revision = '0005'
branch_labels = None
depends_on = None

SEVERITIES = {"look": "warning", "bad": "critical"}
RULES = {
    "mismatch_look": "mismatch_warning",
    "mismatch_bad": "mismatch_critical",
    "mismatch_baseline_bad": "mismatch_baseline_critical",
    "multiplicative_error_look": "multiplicative_error_warning",
    "multiplicative_error_bad": "multiplicative_error_critical",
}
# Reports of a step have a few kilobytes; so many are in memory at a time.
ROWS_AT_A_TIME = 500

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
ALERTS = sa.table("alerts", sa.column("rule", sa.String()), sa.column("severity", sa.String()))
STEP_LINT = sa.table(
    "step_lint",
    sa.column("run_id", sa.String()),
    sa.column("attempt", sa.BigInteger()),
    sa.column("step", sa.BigInteger()),
    sa.column("severity", sa.String()),
    sa.column("warnings", JSON),
    sa.column("report", JSON),
)


def upgrade() -> None:
    rename(SEVERITIES, RULES)


def downgrade() -> None:
    rename({new: old for old, new in SEVERITIES.items()}, {new: old for old, new in RULES.items()})


def rename(severities: Mapping[str, str], rules: Mapping[str, str]) -> None:
    """Replace each severity and rule name by the one that it maps to, in columns and inside JSON."""
    for old, new in severities.items():
        op.execute(ALERTS.update().where(ALERTS.c.severity == old).values(severity=new))
    for old, new in rules.items():
        op.execute(ALERTS.update().where(ALERTS.c.rule == old).values(rule=new))
    _rename_in_lint(op.get_bind(), severities)


def _rename_in_lint(connection: sa.Connection, severities: Mapping[str, str]) -> None:
    # Steps without a warning have no severity, neither in the column nor in their report.
    columns = STEP_LINT.c
    query = sa.select(STEP_LINT).where(columns.severity.in_(severities))
    query = query.order_by(columns.run_id, columns.attempt, columns.step).limit(ROWS_AT_A_TIME)
    while rows := connection.execute(query).mappings().all():
        for row in rows:
            of_step = (columns.run_id == row["run_id"], columns.attempt == row["attempt"], columns.step == row["step"])
            connection.execute(STEP_LINT.update().where(*of_step).values(**_renamed(row, severities)))


def _renamed(row: Mapping[str, Any], severities: Mapping[str, str]) -> dict[str, Any]:
    report = dict(row["report"])
    report["warnings"] = [
        {**warning, "severity": severities.get(warning["severity"], warning["severity"])}
        for warning in report["warnings"]
    ]
    return {
        "severity": severities[row["severity"]],
        "warnings": {name: severities.get(severity, severity) for name, severity in row["warnings"].items()},
        "report": report,
    }
