"""States of the detectors that are in memory only: their rows have an identity and no state."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0038'
down_revision = '0037'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('detector_snapshots', sa.Column('identity', sa.BigInteger(), nullable=True))
    random = 'abs(random() / 2)' if op.get_bind().dialect.name == 'sqlite' else 'CAST(random() * 4e18 AS BIGINT)'
    op.execute(f'UPDATE detector_snapshots SET identity = {random}')
    with op.batch_alter_table('detector_snapshots', schema=None) as batch_op:
        batch_op.alter_column('identity', existing_type=sa.BigInteger(), nullable=False)
        batch_op.alter_column('state', existing_type=sa.LargeBinary(), nullable=True)


def downgrade() -> None:
    # They are derived again by the release before.
    op.execute(
        'INSERT INTO due_replays (run_id, from_step, through_step, changes) '
        'SELECT run_id, min(step), max(step), 1 FROM detector_snapshots '
        'WHERE state IS NULL AND run_id NOT IN (SELECT run_id FROM due_replays) GROUP BY run_id'
    )
    op.execute('DELETE FROM detector_snapshots WHERE state IS NULL')
    with op.batch_alter_table('detector_snapshots', schema=None) as batch_op:
        batch_op.alter_column('state', existing_type=sa.LargeBinary(), nullable=False)
        batch_op.drop_column('identity')
