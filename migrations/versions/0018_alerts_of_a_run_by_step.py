"""Indexes of alerts without the attempt: what a closed step touches is one range, however many attempts a run has."""

from __future__ import annotations

from alembic import op

revision = '0018'
down_revision = '0017'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index(op.f('ix_alerts_run_id_attempt_step'), 'alerts')
    op.drop_index(op.f('ix_alerts_run_id_attempt_cleared_step'), 'alerts')
    op.create_index(op.f('ix_alerts_run_id_step'), 'alerts', ['run_id', 'step'])
    op.create_index(op.f('ix_alerts_run_id_cleared_step'), 'alerts', ['run_id', 'cleared_step'])


def downgrade() -> None:
    op.drop_index(op.f('ix_alerts_run_id_cleared_step'), 'alerts')
    op.drop_index(op.f('ix_alerts_run_id_step'), 'alerts')
    op.create_index(op.f('ix_alerts_run_id_attempt_step'), 'alerts', ['run_id', 'attempt', 'step'])
    op.create_index(op.f('ix_alerts_run_id_attempt_cleared_step'), 'alerts', ['run_id', 'attempt', 'cleared_step'])
