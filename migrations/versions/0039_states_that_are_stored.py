"""Every state of the detectors that has a row is stored; what is due names the first step that changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0039'
down_revision = '0038'
branch_labels = None
depends_on = None


def upgrade() -> None:
    # What they were is derived again.
    op.execute('DELETE FROM detector_snapshots WHERE state IS NULL')
    with op.batch_alter_table('detector_snapshots', schema=None) as batch_op:
        batch_op.alter_column('state', existing_type=sa.LargeBinary(), nullable=False)
        batch_op.drop_column('identity')
    op.execute('UPDATE due_replays SET through_step = from_step')
    with op.batch_alter_table('due_replays', schema=None) as batch_op:
        batch_op.alter_column('through_step', new_column_name='changed_step', existing_type=sa.BigInteger())
        batch_op.drop_column('changes')


def downgrade() -> None:
    op.add_column('detector_snapshots', sa.Column('identity', sa.BigInteger(), nullable=True))
    random = 'abs(random() / 2)' if op.get_bind().dialect.name == 'sqlite' else 'CAST(random() * 4e18 AS BIGINT)'
    op.execute(f'UPDATE detector_snapshots SET identity = {random}')
    with op.batch_alter_table('detector_snapshots', schema=None) as batch_op:
        batch_op.alter_column('identity', existing_type=sa.BigInteger(), nullable=False)
        batch_op.alter_column('state', existing_type=sa.LargeBinary(), nullable=True)
    op.add_column('due_replays', sa.Column('changes', sa.BigInteger(), nullable=False, server_default='1'))
    with op.batch_alter_table('due_replays', schema=None) as batch_op:
        batch_op.alter_column('changes', existing_type=sa.BigInteger(), server_default=None)
        batch_op.alter_column('changed_step', new_column_name='through_step', existing_type=sa.BigInteger())
