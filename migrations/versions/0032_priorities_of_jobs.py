"""Priorities of probe jobs, and the rank by which they are leased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0032'
down_revision = '0031'
branch_labels = None
depends_on = None

_DAY_US = 86_400_000_000


def upgrade() -> None:
    op.add_column('probes', sa.Column('priority', sa.String(), nullable=True))
    # Without a batch, which would build the table anew: jobs are pointed to by rows of other tables.
    op.add_column('probe_jobs', sa.Column('priority', sa.String(), nullable=False, server_default='normal'))
    op.add_column('probe_jobs', sa.Column('rank_us', sa.BigInteger(), nullable=False, server_default='0'))
    op.drop_index('ix_probe_jobs_state_queued_at_us_id', 'probe_jobs')
    op.create_index('ix_probe_jobs_state_rank_us_id', 'probe_jobs', ['state', 'rank_us', 'id'])
    # The head start of the priority `normal`.
    op.execute(sa.text(f'UPDATE probe_jobs SET rank_us = queued_at_us - {_DAY_US}'))


def downgrade() -> None:
    op.drop_index('ix_probe_jobs_state_rank_us_id', 'probe_jobs')
    op.create_index('ix_probe_jobs_state_queued_at_us_id', 'probe_jobs', ['state', 'queued_at_us', 'id'])
    op.drop_column('probe_jobs', 'rank_us')
    op.drop_column('probe_jobs', 'priority')
    op.drop_column('probes', 'priority')
