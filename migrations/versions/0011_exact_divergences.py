
"""Exact divergences of pairs of scorers, and the pairs that probes request and workers offer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), 'postgresql')
# These tables have rows, which ask for no pair and offer none.
WITH_PAIRS = ('probes', 'probe_jobs', 'workers')


def upgrade() -> None:
    for table in WITH_PAIRS:
        op.add_column(table, sa.Column('exact_pairs', JSON, nullable=False, server_default=sa.text("'[]'")))
    op.create_table(
        'exact_shards',
        sa.Column('job_id', sa.String(), nullable=False),
        sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('pair', sa.String(), nullable=False),
        sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('digest', sa.String(), nullable=False),
        sa.Column('body_bytes', sa.BigInteger(), nullable=False),
        sa.Column('file', sa.String(), nullable=False),
        sa.Column('rollouts', sa.BigInteger(), nullable=False),
        sa.Column('tokens', sa.BigInteger(), nullable=False),
        sa.Column('target_fingerprint_digest', sa.String(), nullable=False),
        sa.Column('target_fingerprint', JSON, nullable=False),
        sa.Column('behaviour_fingerprint_digest', sa.String(), nullable=False),
        sa.Column('behaviour_fingerprint', JSON, nullable=False),
        sa.Column('received_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_exact_shards_job_id_probe_jobs')),
        sa.PrimaryKeyConstraint('job_id', 'token', 'pair', 'shard', name=op.f('pk_exact_shards')),
    )
    op.create_table(
        'exact_divergences',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('rollout_set_digest', sa.String(), nullable=False),
        sa.Column('pair', sa.String(), nullable=False),
        sa.Column('target_fingerprint_digest', sa.String(), nullable=False),
        sa.Column('behaviour_fingerprint_digest', sa.String(), nullable=False),
        sa.Column('target_fingerprint', JSON, nullable=False),
        sa.Column('behaviour_fingerprint', JSON, nullable=False),
        sa.Column('job_id', sa.String(), nullable=False),
        sa.Column('token', sa.BigInteger(), nullable=False),
        sa.Column('accelerator', sa.String(), nullable=False),
        sa.Column('device_name', sa.String(), nullable=False),
        sa.Column('rollouts', sa.BigInteger(), nullable=False),
        sa.Column('tokens', sa.BigInteger(), nullable=False),
        sa.Column('from_sample', sa.Boolean(), nullable=False),
        sa.Column('measures', JSON, nullable=False),
        sa.Column('published_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ['job_id'], ['probe_jobs.id'], name=op.f('fk_exact_divergences_job_id_probe_jobs')
        ),
        sa.ForeignKeyConstraint(
            ['run_id', 'attempt', 'step'],
            ['steps.run_id', 'steps.attempt', 'steps.step'],
            name=op.f('fk_exact_divergences_run_id_attempt_step_steps'),
        ),
        sa.PrimaryKeyConstraint(
            'run_id',
            'attempt',
            'step',
            'rollout_set_digest',
            'pair',
            'target_fingerprint_digest',
            'behaviour_fingerprint_digest',
            name=op.f('pk_exact_divergences'),
        ),
    )
    op.create_index(op.f('ix_exact_divergences_job_id'), 'exact_divergences', ['job_id'])


def downgrade() -> None:
    op.drop_index(op.f('ix_exact_divergences_job_id'), table_name='exact_divergences')
    op.drop_table('exact_divergences')
    op.drop_table('exact_shards')
    # No batch: it would drop and make the tables again, which the foreign keys of other tables forbid.
    for table in reversed(WITH_PAIRS):
        op.drop_column(table, 'exact_pairs')
