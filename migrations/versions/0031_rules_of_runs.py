"""Rules of a run, in versions that hold from a step on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0031'
down_revision = '0030'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'rules_versions',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('version', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('effective_from_step', sa.BigInteger(), nullable=False),
        sa.Column('toml', sa.String(), nullable=False),
        sa.Column('made_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_rules_versions_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', 'version', name=op.f('pk_rules_versions')),
    )
    op.add_column('runs', sa.Column('rules_version', sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column('runs', 'rules_version')
    op.drop_table('rules_versions')
