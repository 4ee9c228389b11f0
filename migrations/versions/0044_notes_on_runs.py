"""Tags, a note and a baseline of each run, which people write."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0044'
down_revision = '0043'
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column('runs', sa.Column('tags', JSON, nullable=False, server_default="[]"))
    op.add_column('runs', sa.Column('note', sa.String(), nullable=True))
    op.add_column('runs', sa.Column('baseline', sa.String(), nullable=True))


def downgrade() -> None:
    for name in ('baseline', 'note', 'tags'):
        op.drop_column('runs', name)
