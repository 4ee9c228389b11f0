"""Columns of the measures that statistics of version 2 give; NULL until `foreshock remeasure` fills them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None

COLUMNS = (
    "tail_below_ln2", "tail_below_ln5", "tail_below_1", "tail_below_3", "tail_below_10", "tail_above_ln2",
    "tail_above_ln5", "tail_above_1", "tail_above_3", "tail_above_10", "tail_asymmetry_ln2",
    "tail_asymmetry_ln5", "tail_asymmetry_3", "tail_asymmetry_10",
)  # fmt: skip


def upgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name in COLUMNS:
            measurements.add_column(sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name in COLUMNS:
            measurements.drop_column(name)
