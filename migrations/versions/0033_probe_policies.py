"""Policies of automatic probes, and the probes that they made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0033'
down_revision = '0032'
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(astext_type=sa.Text()), 'postgresql')


def upgrade() -> None:
    op.create_table(
        'probe_policies',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('policy', _JSON, nullable=False),
        sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_probe_policies_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', name=op.f('pk_probe_policies')),
    )
    op.create_table(
        'policy_probes',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('cause', sa.String(), nullable=False),
        sa.Column('probe_id', sa.String(), nullable=True),
        sa.Column('problem', sa.String(), nullable=True),
        sa.Column('made_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_policy_probes_run_id_runs')),
        sa.ForeignKeyConstraint(['probe_id'], ['probes.id'], name=op.f('fk_policy_probes_probe_id_probes')),
        sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_policy_probes')),
    )
    op.create_index(op.f('ix_policy_probes_probe_id'), 'policy_probes', ['probe_id'])


def downgrade() -> None:
    op.drop_table('policy_probes')
    op.drop_table('probe_policies')
