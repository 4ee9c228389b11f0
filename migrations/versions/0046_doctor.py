"""The doctor in place of weights searches: stored searches become reports, queued ones end."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from alembic.util import load_python_file

revision = '0046'
down_revision = '0045'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('probes', sa.Column('budget_seconds', sa.Double(), nullable=True))
    op.add_column('probe_jobs', sa.Column('doing', sa.String(), nullable=False, server_default=""))
    load_python_file(str(Path(__file__).parents[1]), "weights_searches.py").convert(op.get_bind())


def downgrade() -> None:
    op.execute("DELETE FROM probe_results WHERE kind = 'doctor'")
    op.execute("UPDATE probes SET kind = 'weights' WHERE kind = 'doctor'")
    op.drop_column('probe_jobs', 'doing')
    op.drop_column('probes', 'budget_seconds')
