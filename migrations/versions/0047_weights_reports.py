"""Reports of the weights that trainer and engines hold after a sync, for the notary."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0047'
down_revision = '0046'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('weights_reports',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('holder', sa.String(), nullable=False),
    sa.Column('report', sa.LargeBinary(), nullable=True),
    sa.Column('verdict', sa.LargeBinary(), nullable=True),
    sa.Column('engines', sa.BigInteger(), nullable=True),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_weights_reports_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'step', 'attempt', 'holder', name='pk_weights_reports')
    )


def downgrade() -> None:
    op.drop_table('weights_reports')
