"""An index by which the newest probes of all runs are found."""

from __future__ import annotations

from alembic import op

revision = '0025'
down_revision = '0024'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(op.f('ix_probes_created_at_us_id'), 'probes', ['created_at_us', 'id'])


def downgrade() -> None:
    op.drop_index(op.f('ix_probes_created_at_us_id'), 'probes')
