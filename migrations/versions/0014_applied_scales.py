"""The scale that a trainer acknowledged beside its learning rate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0014'
down_revision = '0013'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('advice_acknowledgements', sa.Column('applied_scale', sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column('advice_acknowledgements', 'applied_scale')
