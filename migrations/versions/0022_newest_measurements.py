"""The newest step of each run and comparison, and the totals of each run: what /metrics reads of long runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0022'
down_revision = '0021'
branch_labels = None
depends_on = None

_TOTALS = """
UPDATE runs SET
  rollouts = COALESCE((SELECT SUM(rollouts) FROM steps WHERE steps.run_id = runs.id), 0),
  tokens = COALESCE((SELECT SUM(tokens) FROM steps WHERE steps.run_id = runs.id), 0),
  last_shard_at_us = (SELECT MAX(last_shard_at_us) FROM steps WHERE steps.run_id = runs.id)
"""
_NEWEST = """
INSERT INTO newest_measurements (run_id, comparison, attempt, step, revision, rewritten, buckets)
SELECT run_id, comparison, attempt, MAX(step), 1, 1, NULL FROM measurements AS m
WHERE attempt = (SELECT MAX(attempt) FROM measurements AS o WHERE o.run_id = m.run_id AND o.comparison = m.comparison)
GROUP BY run_id, comparison, attempt
"""


def upgrade() -> None:
    op.create_table(
        'newest_measurements',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('comparison', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('revision', sa.BigInteger(), nullable=False),
        sa.Column('rewritten', sa.BigInteger(), nullable=False),
        sa.Column('buckets', sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'],
            name=op.f('fk_newest_measurements_run_id_attempt_attempts'),
        ),
        sa.PrimaryKeyConstraint('run_id', 'comparison', name=op.f('pk_newest_measurements')),
    )
    op.add_column('runs', sa.Column('rollouts', sa.BigInteger(), nullable=False, server_default='0'))
    op.add_column('runs', sa.Column('tokens', sa.BigInteger(), nullable=False, server_default='0'))
    op.add_column('runs', sa.Column('last_shard_at_us', sa.BigInteger(), nullable=True))
    op.execute(_TOTALS)
    op.execute(_NEWEST)


def downgrade() -> None:
    op.drop_column('runs', 'last_shard_at_us')
    op.drop_column('runs', 'tokens')
    op.drop_column('runs', 'rollouts')
    op.drop_table('newest_measurements')
