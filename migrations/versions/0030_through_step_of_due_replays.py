"""Due replays: the last step that changed, from which on a replay may meet the stored states again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0030'
down_revision = '0029'
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Replays that are due now go on to the last step.
    op.add_column('due_replays', sa.Column('through_step', sa.BigInteger(), nullable=False, server_default=str(2**62)))


def downgrade() -> None:
    op.drop_column('due_replays', 'through_step')
