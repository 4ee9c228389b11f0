"""The clients that log an attempt: their last sign of life, and what they could not deliver."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0013'
down_revision = '0012'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('seen_at_us', sa.BigInteger(), nullable=True))
    op.create_table(
        'attempt_clients',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('client', sa.String(), nullable=False),
        sa.Column('shard', sa.BigInteger(), nullable=True),
        sa.Column('undelivered', sa.BigInteger(), nullable=False),
        sa.Column('rejected', sa.BigInteger(), nullable=False),
        sa.Column('dropped', sa.BigInteger(), nullable=False),
        sa.Column('invalid', sa.BigInteger(), nullable=False),
        sa.Column('reason', sa.String(), nullable=True),
        sa.Column('seen_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'],
            name=op.f('fk_attempt_clients_run_id_attempt_attempts'),
        ),
        sa.PrimaryKeyConstraint('run_id', 'attempt', 'client', name=op.f('pk_attempt_clients')),
    )
    op.create_index(op.f('ix_attempt_clients_run_id_seen_at_us'), 'attempt_clients', ['run_id', 'seen_at_us'])


def downgrade() -> None:
    op.drop_table('attempt_clients')
    op.drop_column('runs', 'seen_at_us')
