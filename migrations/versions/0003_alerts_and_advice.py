"""Alerts and advice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('advice_decisions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('revision', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('effective_from_step', sa.BigInteger(), nullable=False),
    sa.Column('reason', sa.String(), nullable=False),
    sa.Column('author', sa.String(), nullable=False),
    sa.Column('made_at_us', sa.BigInteger(), nullable=False),
    sa.Column('decision', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_advice_decisions_run_id_runs')),
    sa.PrimaryKeyConstraint('run_id', 'revision', name=op.f('pk_advice_decisions'))
    )
    op.create_table('advice_acknowledgements',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.Column('applied_learning_rate', sa.Double(), nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_advice_acknowledgements_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_advice_acknowledgements'))
    )
    op.create_table('alerts',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('rule', sa.String(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('severity', sa.String(), nullable=False),
    sa.Column('value', sa.Double(), nullable=False),
    sa.Column('threshold', sa.Double(), nullable=False),
    sa.Column('why', sa.String(), nullable=False),
    sa.Column('what_to_do', sa.String(), nullable=False),
    sa.Column('moves_learning_rate', sa.Boolean(), nullable=False),
    sa.Column('evidence', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('cleared_step', sa.BigInteger(), nullable=True),
    sa.Column('changed_by', sa.String(), nullable=False),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('opened_at_us', sa.BigInteger(), nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_alerts_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_alerts')),
    sa.UniqueConstraint('run_id', 'attempt', 'rule', 'step', name=op.f('uq_alerts_run_id_attempt_rule_step'))
    )
    with op.batch_alter_table('alerts', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_alerts_run_id_state'), ['run_id', 'state'], unique=False)
        batch_op.create_index(batch_op.f('ix_alerts_run_id_version'), ['run_id', 'version'], unique=False)

    op.create_table('detector_snapshots',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('configuration_digest', sa.String(), nullable=False),
    sa.Column('milestone', sa.Boolean(), nullable=False),
    sa.Column('state', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_detector_snapshots_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_detector_snapshots'))
    )
    op.create_table('trainer_progress',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('polled_step', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_trainer_progress_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name=op.f('pk_trainer_progress'))
    )


def downgrade() -> None:
    op.drop_table('trainer_progress')
    op.drop_table('detector_snapshots')
    with op.batch_alter_table('alerts', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_alerts_run_id_version'))
        batch_op.drop_index(batch_op.f('ix_alerts_run_id_state'))

    op.drop_table('alerts')
    op.drop_table('advice_acknowledgements')
    op.drop_table('advice_decisions')
