"""Probes, their jobs and leases, and their results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def create() -> None:
    op.create_table('workers',
    sa.Column('project', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('environments', JSON, nullable=False),
    sa.Column('scorers', JSON, nullable=False),
    sa.Column('exact_pairs', JSON, nullable=False),
    sa.Column('first_seen_at_us', sa.BigInteger(), nullable=False),
    sa.Column('last_seen_at_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('project', 'name', name='pk_workers')
    )

    op.create_table('probe_policies',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('policy', JSON, nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_probe_policies_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', name='pk_probe_policies')
    )

    op.create_table('attributions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('stale', sa.Boolean(), nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.Column('document', JSON, nullable=True),
    sa.Column('computed_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_attributions_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_attributions')
    )
    op.create_index('ix_attributions_stale_changed_at_us', 'attributions', ['stale', 'changed_at_us'])

    op.create_table('probes',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('request_digest', sa.String(), nullable=False),
    sa.Column('scorers', JSON, nullable=False),
    sa.Column('exact_pairs', JSON, nullable=False),
    sa.Column('options', JSON, nullable=False),
    sa.Column('accelerator', sa.String(), nullable=True),
    sa.Column('environment', sa.String(), nullable=True),
    sa.Column('max_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('priority', sa.String(), nullable=True),
    sa.Column('checkpoint', JSON, nullable=False),
    sa.Column('checkpoint_expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('candidates', JSON, nullable=True),
    sa.Column('selection', JSON, nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_probes_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('id', name='pk_probes'),
    sa.UniqueConstraint('run_id', 'request_digest', name='uq_probes_run_id_request_digest')
    )
    op.create_index('ix_probes_created_at_us_id', 'probes', ['created_at_us', 'id'])
    op.create_index('ix_probes_run_id_created_at_us_id', 'probes', ['run_id', 'created_at_us', 'id'])

    op.create_table('policy_probes',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('cause', sa.String(), nullable=False),
    sa.Column('probe_id', sa.String(), nullable=True),
    sa.Column('problem', sa.String(), nullable=True),
    sa.Column('made_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['probe_id'], ['probes.id'], name='fk_policy_probes_probe_id_probes'),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_policy_probes_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_policy_probes')
    )
    op.create_index('ix_policy_probes_probe_id', 'policy_probes', ['probe_id'])

    op.create_table('probe_jobs',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('probe_id', sa.String(), nullable=False),
    sa.Column('engine', sa.String(), nullable=False),
    sa.Column('scorers', JSON, nullable=False),
    sa.Column('exact_pairs', JSON, nullable=False),
    sa.Column('needs', sa.String(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=True),
    sa.Column('environments', sa.String(), nullable=False),
    sa.Column('environment_required', sa.Boolean(), nullable=False),
    sa.Column('environment', sa.String(), nullable=True),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('tries', sa.BigInteger(), nullable=False),
    sa.Column('fencing_token', sa.BigInteger(), nullable=False),
    sa.Column('lease_id', sa.String(), nullable=True),
    sa.Column('lease_expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('worker', sa.String(), nullable=True),
    sa.Column('reason', sa.String(), nullable=True),
    sa.Column('reasons', JSON, nullable=False),
    sa.Column('priority', sa.String(), nullable=False),
    sa.Column('queued_at_us', sa.BigInteger(), nullable=False),
    sa.Column('rank_us', sa.BigInteger(), nullable=False),
    sa.Column('finished_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['probe_id'], ['probes.id'], name='fk_probe_jobs_probe_id_probes'),
    sa.PrimaryKeyConstraint('id', name='pk_probe_jobs'),
    sa.UniqueConstraint('probe_id', 'engine', name='uq_probe_jobs_probe_id_engine')
    )
    op.create_index('ix_probe_jobs_state_rank_us_id', 'probe_jobs', ['state', 'rank_us', 'id'])

    op.create_table('exact_divergences',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('pair', sa.String(), nullable=False),
    sa.Column('target_fingerprint_digest', sa.String(), nullable=False),
    sa.Column('behaviour_fingerprint_digest', sa.String(), nullable=False),
    sa.Column('target_fingerprint', JSON, nullable=False),
    sa.Column('behaviour_fingerprint', JSON, nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('measures', JSON, nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_exact_divergences_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_exact_divergences_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'rollout_set_digest', 'pair', 'target_fingerprint_digest', 'behaviour_fingerprint_digest', name='pk_exact_divergences')
    )
    op.create_index('ix_exact_divergences_job_id', 'exact_divergences', ['job_id'])

    op.create_table('exact_shards',
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('pair', sa.String(), nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('body_bytes', sa.BigInteger(), nullable=False),
    sa.Column('file', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('target_fingerprint_digest', sa.String(), nullable=False),
    sa.Column('target_fingerprint', JSON, nullable=False),
    sa.Column('behaviour_fingerprint_digest', sa.String(), nullable=False),
    sa.Column('behaviour_fingerprint', JSON, nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_exact_shards_job_id_probe_jobs'),
    sa.PrimaryKeyConstraint('job_id', 'token', 'pair', 'shard', name='pk_exact_shards')
    )

    op.create_table('layer_comparisons',
    sa.Column('pair', sa.String(), nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('document', JSON, nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_layer_comparisons_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_layer_comparisons_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('job_id', 'token', name='pk_layer_comparisons')
    )
    op.create_index('ix_layer_comparisons_run_id_attempt_step_published_at_us', 'layer_comparisons', ['run_id', 'attempt', 'step', 'published_at_us'])

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
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_leases_job_id_probe_jobs'),
    sa.PrimaryKeyConstraint('id', name='pk_leases'),
    sa.UniqueConstraint('job_id', 'token', name='uq_leases_job_id_token')
    )
    op.create_index('ix_leases_outcome_accelerator', 'leases', ['outcome', 'accelerator'])

    op.create_table('routing_comparisons',
    sa.Column('pair', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('document', JSON, nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_routing_comparisons_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_routing_comparisons_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('job_id', 'token', name='pk_routing_comparisons')
    )
    op.create_index('ix_routing_comparisons_run_id_attempt_step_published_at_us', 'routing_comparisons', ['run_id', 'attempt', 'step', 'published_at_us'])

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
    sa.Column('fingerprint', JSON, nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_score_shards_job_id_probe_jobs'),
    sa.PrimaryKeyConstraint('job_id', 'token', 'scorer', 'variant', 'shard', name='pk_score_shards')
    )

    op.create_table('scores',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('scorer', sa.String(), nullable=False),
    sa.Column('fingerprint_digest', sa.String(), nullable=False),
    sa.Column('variant', sa.String(), nullable=False),
    sa.Column('fingerprint', JSON, nullable=False),
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), nullable=False),
    sa.Column('accelerator', sa.String(), nullable=False),
    sa.Column('device_name', sa.String(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_scores_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_scores_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'rollout_set_digest', 'scorer', 'fingerprint_digest', 'variant', name='pk_scores')
    )
    op.create_index('ix_scores_job_id', 'scores', ['job_id'])

    op.create_table('weights_searches',
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('document', JSON, nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_weights_searches_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_weights_searches_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('job_id', 'token', name='pk_weights_searches')
    )
    op.create_index('ix_weights_searches_run_id_attempt_step_published_at_us', 'weights_searches', ['run_id', 'attempt', 'step', 'published_at_us'])
