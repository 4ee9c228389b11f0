"""Environments that workers offer and that jobs prefer or require; none in what the release before stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None


def upgrade() -> None:
    names = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    # Defaults for the rows of the release before only: the service sets every value.
    op.add_column('workers', sa.Column('environments', names, nullable=False, server_default='[]'))
    op.add_column('probes', sa.Column('environment', sa.String(), nullable=True))
    op.add_column('probe_jobs', sa.Column('environments', sa.String(), nullable=False, server_default=''))
    op.add_column(
        'probe_jobs', sa.Column('environment_required', sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column('probe_jobs', sa.Column('environment', sa.String(), nullable=True))
    # The sweeper computes them again, with the environments of their scores.
    op.execute(sa.table('attributions', sa.column('stale', sa.Boolean())).update().values(stale=True))


def downgrade() -> None:
    # No batch: it would drop and make the tables again, which the foreign keys of others forbid.
    op.drop_column('probe_jobs', 'environment')
    op.drop_column('probe_jobs', 'environment_required')
    op.drop_column('probe_jobs', 'environments')
    op.drop_column('probes', 'environment')
    op.drop_column('workers', 'environments')
