"""Deleted rollouts and runs, purged tokens, and files that wait for their removal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0019'
down_revision = '0018'
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), 'postgresql')
# Table, column, type, default of the rows that exist.
COLUMNS = (
    ('runs', 'rows_removed_at_us', sa.BigInteger(), None),
    ('runs', 'deletions', sa.BigInteger(), '0'),
    ('runs', 'retention', _JSON, None),
    ('steps', 'tokens_purged_at_us', sa.BigInteger(), None),
    ('shards', 'deleted_rollouts', sa.BigInteger(), None),
    ('shards', 'tokens_removed', sa.String(), None),
    ('shards', 'tokens_changed_at_us', sa.BigInteger(), None),
)


def upgrade() -> None:
    for table, name, kind, default in COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=default is None, server_default=default))
    op.create_table(
        'file_removals',
        sa.Column('file', sa.String(), nullable=False),
        sa.Column('file_bytes', sa.BigInteger(), nullable=False),
        sa.Column('reason', sa.String(), nullable=False),
        sa.Column('due_at_us', sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint('file', name=op.f('pk_file_removals')),
    )
    op.create_index(op.f('ix_file_removals_due_at_us'), 'file_removals', ['due_at_us'])
    op.create_table(
        'deletions',
        sa.Column('id', sa.String(), nullable=False),
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('sample_digests', _JSON, nullable=False),
        sa.Column('group_digests', _JSON, nullable=False),
        sa.Column('attempt', sa.BigInteger(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('steps', sa.BigInteger(), nullable=False),
        sa.Column('rollouts', sa.BigInteger(), nullable=False),
        sa.Column('files', sa.BigInteger(), nullable=False),
        sa.Column('requested_at_us', sa.BigInteger(), nullable=False),
        sa.Column('finished_at_us', sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_deletions_run_id_runs')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_deletions')),
    )
    op.create_index(op.f('ix_deletions_run_id_requested_at_us'), 'deletions', ['run_id', 'requested_at_us'])
    op.create_index(op.f('ix_deletions_finished_at_us'), 'deletions', ['finished_at_us'])


def downgrade() -> None:
    op.drop_table('deletions')
    op.drop_table('file_removals')
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)
