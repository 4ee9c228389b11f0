"""Weights searches: their results, and the candidate checkpoints of a probe; NULL for probes of another kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0012'
down_revision = '0011'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('probes') as probes:
        probes.add_column(
            sa.Column('candidates', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=True)
        )
    op.create_table('weights_searches',
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('document', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_weights_searches_job_id_probe_jobs')),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_weights_searches_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('job_id', 'token', name=op.f('pk_weights_searches'))
    )
    with op.batch_alter_table('weights_searches') as searches:
        searches.create_index(searches.f('ix_weights_searches_run_id_attempt_step_published_at_us'), ['run_id', 'attempt', 'step', 'published_at_us'], unique=False)


def downgrade() -> None:
    with op.batch_alter_table('weights_searches') as searches:
        searches.drop_index(searches.f('ix_weights_searches_run_id_attempt_step_published_at_us'))
    op.drop_table('weights_searches')
    with op.batch_alter_table('probes') as probes:
        probes.drop_column('candidates')
