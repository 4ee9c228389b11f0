"""The time at which the launch of an attempt began: it orders the attempts of a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0048'
down_revision = '0047'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('attempts', sa.Column('began_at_us', sa.BigInteger(), nullable=False, server_default="0"))
    # The latest time up to each attempt keeps the order of the numbers, even if the clock was once set back.
    op.execute(
        "UPDATE attempts SET began_at_us = (SELECT max(earlier.created_at_us) FROM attempts AS earlier "
        "WHERE earlier.run_id = attempts.run_id AND earlier.attempt <= attempts.attempt)"
    )


def downgrade() -> None:
    op.drop_column('attempts', 'began_at_us')
