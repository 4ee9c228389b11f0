"""Columns of prompt groups, effective groups and reliability; NULL until `foreshock remeasure` fills them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None

COLUMNS = {"effective_groups": sa.Double(), "k3_kl_interval_reliable": sa.Double(), "prompt_groups": sa.Double()}


def upgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name, kind in COLUMNS.items():
            measurements.add_column(sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name in COLUMNS:
            measurements.drop_column(name)
