"""The kind of a run's model, declared or derived from a checkpoint; NULL in what the release before stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('runs', sa.Column('declared_model_kind', sa.String(), nullable=True))
    op.add_column('runs', sa.Column('derived_model_kind', sa.String(), nullable=True))
    op.add_column('checkpoints', sa.Column('model_kind', sa.String(), nullable=True))


def downgrade() -> None:
    # No batch: it would drop and make `runs` again, which the foreign keys of other tables forbid.
    op.drop_column('checkpoints', 'model_kind')
    op.drop_column('runs', 'derived_model_kind')
    op.drop_column('runs', 'declared_model_kind')
