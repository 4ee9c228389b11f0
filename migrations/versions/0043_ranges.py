"""Drop the verdict on intervals, since none is called a 95 % interval any more."""

from __future__ import annotations

from alembic import op

revision = '0043'
down_revision = '0042'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE measurements DROP COLUMN k3_kl_interval_reliable")


def downgrade() -> None:
    op.execute("ALTER TABLE measurements ADD COLUMN k3_kl_interval_reliable DOUBLE PRECISION")
