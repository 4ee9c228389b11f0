"""Comparisons of hidden states by layer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0035'
down_revision = '0034'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'layer_comparisons',
        sa.Column('job_id', sa.String(), nullable=False),
        sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('pair', sa.String(), nullable=False),
        sa.Column('document', sa.JSON().with_variant(postgresql.JSONB(), 'postgresql'), nullable=False),
        sa.Column('published_at_us', sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_layer_comparisons_job_id_probe_jobs')),
        sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_layer_comparisons_run_id_attempt_step_steps')),
        sa.PrimaryKeyConstraint('job_id', 'token', name=op.f('pk_layer_comparisons')),
    )
    with op.batch_alter_table('layer_comparisons') as comparisons:
        comparisons.create_index(comparisons.f('ix_layer_comparisons_run_id_attempt_step_published_at_us'), ['run_id', 'attempt', 'step', 'published_at_us'], unique=False)


def downgrade() -> None:
    with op.batch_alter_table('layer_comparisons') as comparisons:
        comparisons.drop_index(comparisons.f('ix_layer_comparisons_run_id_attempt_step_published_at_us'))
    op.drop_table('layer_comparisons')
