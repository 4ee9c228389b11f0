"""The diagnosis of each run, which is computed when its data change."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0041'
down_revision = '0040'
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table('diagnoses',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.Column('verdict', sa.String(), nullable=False),
    sa.Column('since_step', sa.BigInteger(), nullable=True),
    sa.Column('headline', sa.String(), nullable=False),
    sa.Column('observed_step', sa.BigInteger(), nullable=True),
    sa.Column('awaits_shards', sa.Boolean(), nullable=False),
    sa.Column('judged_by', sa.String(), nullable=False),
    sa.Column('document', JSON, nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_diagnoses_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', name='pk_diagnoses')
    )


def downgrade() -> None:
    op.drop_table('diagnoses')
