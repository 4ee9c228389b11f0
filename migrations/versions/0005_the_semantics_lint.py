"""The semantics lint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('step_lint',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('severity', sa.String(), nullable=True),
    sa.Column('warnings', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('report', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('surprisal_tokens', sa.BigInteger(), nullable=False),
    sa.Column('surprisal', sa.Double(), nullable=False),
    sa.Column('entropy', sa.Double(), nullable=False),
    sa.Column('surprisal_variance', sa.Double(), nullable=False),
    sa.Column('largest_surprisal', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_step_lint_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_step_lint'))
    )
    with op.batch_alter_table('step_lint', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_step_lint_run_id_severity'), ['run_id', 'severity'], unique=False)

    op.create_table('shard_lint',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('evidence', sa.LargeBinary(), nullable=False),
    sa.Column('examples', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step', 'shard'], ['shards.run_id', 'shards.attempt', 'shards.step', 'shards.shard'], name=op.f('fk_shard_lint_run_id_attempt_step_shard_shards')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', name=op.f('pk_shard_lint'))
    )


def downgrade() -> None:
    op.drop_table('shard_lint')
    with op.batch_alter_table('step_lint', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_step_lint_run_id_severity'))

    op.drop_table('step_lint')
