"""Probes, leases and scores."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('workers',
    sa.Column('project', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('scorers', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('first_seen_at_us', sa.BigInteger(), nullable=False),
    sa.Column('last_seen_at_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('project', 'name', name=op.f('pk_workers'))
    )
    op.create_table('attributions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('stale', sa.Boolean(), nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.Column('document', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=True),
    sa.Column('computed_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_attributions_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_attributions'))
    )
    with op.batch_alter_table('attributions', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_attributions_stale_changed_at_us'), ['stale', 'changed_at_us'], unique=False)

    op.create_table('probes',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('request_digest', sa.String(), nullable=False),
    sa.Column('scorers', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('options', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=True),
    sa.Column('max_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('checkpoint', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('checkpoint_expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('selection', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_probes_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_probes')),
    sa.UniqueConstraint('run_id', 'request_digest', name=op.f('uq_probes_run_id_request_digest'))
    )
    with op.batch_alter_table('probes', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_probes_run_id_created_at_us_id'), ['run_id', 'created_at_us', 'id'], unique=False)

    op.create_table('probe_jobs',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('probe_id', sa.String(), nullable=False),
    sa.Column('engine', sa.String(), nullable=False),
    sa.Column('scorers', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('needs', sa.String(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=True),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('tries', sa.BigInteger(), nullable=False),
    sa.Column('fencing_token', sa.BigInteger(), nullable=False),
    sa.Column('lease_id', sa.String(), nullable=True),
    sa.Column('lease_expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('worker', sa.String(), nullable=True),
    sa.Column('reason', sa.String(), nullable=True),
    sa.Column('reasons', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('queued_at_us', sa.BigInteger(), nullable=False),
    sa.Column('finished_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['probe_id'], ['probes.id'], name=op.f('fk_probe_jobs_probe_id_probes')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_probe_jobs')),
    sa.UniqueConstraint('probe_id', 'engine', name=op.f('uq_probe_jobs_probe_id_engine'))
    )
    with op.batch_alter_table('probe_jobs', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_probe_jobs_state_queued_at_us_id'), ['state', 'queued_at_us', 'id'], unique=False)

    op.create_table('leases',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), nullable=False),
    sa.Column('project', sa.String(), nullable=False),
    sa.Column('worker', sa.String(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('granted_at_us', sa.BigInteger(), nullable=False),
    sa.Column('ended_at_us', sa.BigInteger(), nullable=True),
    sa.Column('outcome', sa.String(), nullable=True),
    sa.Column('reason', sa.String(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_leases_job_id_probe_jobs')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_leases')),
    sa.UniqueConstraint('job_id', 'token', name=op.f('uq_leases_job_id_token'))
    )
    with op.batch_alter_table('leases', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_leases_outcome_accelerator'), ['outcome', 'accelerator'], unique=False)

    op.create_table('score_shards',
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('scorer', sa.String(), nullable=False),
    sa.Column('variant', sa.String(), nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('body_bytes', sa.BigInteger(), nullable=False),
    sa.Column('file', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('fingerprint_digest', sa.String(), nullable=False),
    sa.Column('fingerprint', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_score_shards_job_id_probe_jobs')),
    sa.PrimaryKeyConstraint('job_id', 'token', 'scorer', 'variant', 'shard', name=op.f('pk_score_shards'))
    )
    op.create_table('scores',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('scorer', sa.String(), nullable=False),
    sa.Column('fingerprint_digest', sa.String(), nullable=False),
    sa.Column('variant', sa.String(), nullable=False),
    sa.Column('fingerprint', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=op.f('fk_scores_job_id_probe_jobs')),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_scores_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'rollout_set_digest', 'scorer', 'fingerprint_digest', 'variant', name=op.f('pk_scores'))
    )
    with op.batch_alter_table('scores', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_scores_job_id'), ['job_id'], unique=False)



def downgrade() -> None:
    with op.batch_alter_table('scores', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_scores_job_id'))

    op.drop_table('scores')
    op.drop_table('score_shards')
    with op.batch_alter_table('leases', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_leases_outcome_accelerator'))

    op.drop_table('leases')
    with op.batch_alter_table('probe_jobs', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_probe_jobs_state_queued_at_us_id'))

    op.drop_table('probe_jobs')
    with op.batch_alter_table('probes', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_probes_run_id_created_at_us_id'))

    op.drop_table('probes')
    with op.batch_alter_table('attributions', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_attributions_stale_changed_at_us'))

    op.drop_table('attributions')
    op.drop_table('workers')
