"""The outbox of notifications, and an index by which changed alerts are found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0016'
down_revision = '0015'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'notifications',
        sa.Column('id', sa.String(), nullable=False),
        sa.Column('target', sa.String(), nullable=False),
        sa.Column('alert_id', sa.String(), nullable=False),
        sa.Column('change', sa.String(), nullable=False),
        sa.Column('state', sa.String(), nullable=False),
        sa.Column('tries', sa.BigInteger(), nullable=False),
        sa.Column('due_at_us', sa.BigInteger(), nullable=False),
        sa.Column('lease', sa.String(), nullable=True),
        sa.Column('leased_until_us', sa.BigInteger(), nullable=False),
        sa.Column('error', sa.String(), nullable=True),
        sa.Column('created_at_us', sa.BigInteger(), nullable=False),
        sa.Column('sent_at_us', sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_notifications')),
        sa.UniqueConstraint(
            'target', 'alert_id', 'change', name=op.f('uq_notifications_target_alert_id_change')
        ),
    )
    op.create_index(
        op.f('ix_notifications_target_state_due_at_us'), 'notifications', ['target', 'state', 'due_at_us']
    )
    op.create_index(op.f('ix_alerts_changed_at_us'), 'alerts', ['changed_at_us'])


def downgrade() -> None:
    op.drop_index(op.f('ix_alerts_changed_at_us'), 'alerts')
    op.drop_table('notifications')
