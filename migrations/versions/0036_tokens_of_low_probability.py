"""Columns of the tokens that μ gave a low probability; NULL in older rows until `foreshock remeasure` fills them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0036'
down_revision = '0035'
branch_labels = None
depends_on = None

COLUMNS = ('low_probability_abs_d', 'low_probability_tokens')


def upgrade() -> None:
    # Without a batch, which would build the table of all curves anew.
    for name in COLUMNS:
        op.add_column('measurements', sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column('measurements', name)
