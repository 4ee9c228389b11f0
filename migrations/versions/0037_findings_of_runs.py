"""Findings of runs; those of stored verdicts and attributions are due, and the service reads them in the background."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0037'
down_revision = '0036'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'due_findings',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('source', sa.String(), nullable=False),
        sa.Column('changes', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_due_findings_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', 'source', name=op.f('pk_due_findings')),
    )
    op.create_table(
        'findings',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('source', sa.String(), nullable=False),
        sa.Column('name', sa.String(), nullable=False),
        sa.Column('severity', sa.String(), nullable=False),
        sa.Column('title', sa.String(), nullable=False),
        sa.Column('sentence', sa.String(), nullable=False),
        sa.Column('remedy', sa.String(), nullable=True),
        sa.Column('steps', sa.BigInteger(), nullable=False),
        sa.Column('first_step', sa.BigInteger(), nullable=False),
        sa.Column('newest_step', sa.BigInteger(), nullable=False),
        sa.Column('confidence', sa.JSON().with_variant(postgresql.JSONB(), 'postgresql'), nullable=True),
        sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_findings_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', 'source', 'name', name=op.f('pk_findings')),
    )
    op.create_index(op.f('ix_findings_changed_at_us_run_id_source_name'), 'findings', ['changed_at_us', 'run_id', 'source', 'name'], unique=False)
    for source, having in (
        ('lint', 'step_lint WHERE severity IS NOT NULL'),
        ('attribution', 'attributions WHERE computed_at_us IS NOT NULL'),
    ):
        op.execute(f"INSERT INTO due_findings (run_id, source, changes) SELECT DISTINCT run_id, '{source}', 1 FROM {having}")


def downgrade() -> None:
    op.drop_index(op.f('ix_findings_changed_at_us_run_id_source_name'), 'findings')
    op.drop_table('findings')
    op.drop_table('due_findings')
