"""Runs, rollouts and measurements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('api_keys',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('project', sa.String(), nullable=True),
    sa.Column('scopes', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('secret_hash', sa.String(), nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.Column('revoked_at_us', sa.BigInteger(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_api_keys')),
    sa.UniqueConstraint('secret_hash', name=op.f('uq_api_keys_secret_hash'))
    )
    op.create_table('runs',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('project', sa.String(), nullable=False),
    sa.Column('key', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=True),
    sa.Column('model', sa.String(), nullable=True),
    sa.Column('trainer', sa.String(), nullable=True),
    sa.Column('engine', sa.String(), nullable=True),
    sa.Column('hardware', sa.String(), nullable=True),
    sa.Column('initial_learning_rate', sa.Double(), nullable=True),
    sa.Column('length_cap', sa.BigInteger(), nullable=True),
    sa.Column('advice_mode', sa.String(), nullable=False),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('last_step', sa.BigInteger(), nullable=True),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.Column('updated_at_us', sa.BigInteger(), nullable=False),
    sa.Column('deleted_at_us', sa.BigInteger(), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_runs')),
    sa.UniqueConstraint('project', 'key', name=op.f('uq_runs_project_key'))
    )
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_runs_created_at_us_id'), ['created_at_us', 'id'], unique=False)

    op.create_table('attempts',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('key', sa.String(), nullable=False),
    sa.Column('resume_step', sa.BigInteger(), nullable=False),
    sa.Column('fingerprint', sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_attempts_run_id_runs')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name=op.f('pk_attempts')),
    sa.UniqueConstraint('run_id', 'key', name=op.f('uq_attempts_run_id_key'))
    )
    op.create_table('checkpoints',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('root', sa.String(), nullable=False),
    sa.Column('path', sa.String(), nullable=False),
    sa.Column('format', sa.String(), nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('weights_version', sa.BigInteger(), nullable=True),
    sa.Column('expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('announced_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_checkpoints_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_checkpoints'))
    )
    op.create_table('measurement_statistics',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('statistics', sa.LargeBinary(), nullable=False),
    sa.Column('summaries', sa.LargeBinary(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_measurement_statistics_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'comparison', name=op.f('pk_measurement_statistics'))
    )
    op.create_table('measurements',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('kl', sa.Double(), nullable=True),
    sa.Column('k2_kl', sa.Double(), nullable=True),
    sa.Column('k3_kl', sa.Double(), nullable=True),
    sa.Column('chi2_token', sa.Double(), nullable=True),
    sa.Column('reverse_chi2_token', sa.Double(), nullable=True),
    sa.Column('tv_token', sa.Double(), nullable=True),
    sa.Column('verl_chi2_token', sa.Double(), nullable=True),
    sa.Column('mean_ratio', sa.Double(), nullable=True),
    sa.Column('token_mult_prob_error', sa.Double(), nullable=True),
    sa.Column('mean_abs_d', sa.Double(), nullable=True),
    sa.Column('rms_d', sa.Double(), nullable=True),
    sa.Column('p99_abs_d', sa.Double(), nullable=True),
    sa.Column('p999_abs_d', sa.Double(), nullable=True),
    sa.Column('max_abs_d', sa.Double(), nullable=True),
    sa.Column('min_d', sa.Double(), nullable=True),
    sa.Column('max_d', sa.Double(), nullable=True),
    sa.Column('zero_fraction', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_mean', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_max', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_std', sa.Double(), nullable=True),
    sa.Column('rollout_actor_probs_pearson_corr', sa.Double(), nullable=True),
    sa.Column('ess_token', sa.Double(), nullable=True),
    sa.Column('tail_2', sa.Double(), nullable=True),
    sa.Column('tail_5', sa.Double(), nullable=True),
    sa.Column('tail_10', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_1', sa.Double(), nullable=True),
    sa.Column('k3_kl_per_entropy', sa.Double(), nullable=True),
    sa.Column('surprisal_z', sa.Double(), nullable=True),
    sa.Column('kl_low', sa.Double(), nullable=True),
    sa.Column('kl_high', sa.Double(), nullable=True),
    sa.Column('k3_kl_low', sa.Double(), nullable=True),
    sa.Column('k3_kl_high', sa.Double(), nullable=True),
    sa.Column('kl_seq_mean', sa.Double(), nullable=True),
    sa.Column('k2_kl_seq_mean', sa.Double(), nullable=True),
    sa.Column('k3_kl_seq_mean', sa.Double(), nullable=True),
    sa.Column('chi2_token_seq_mean', sa.Double(), nullable=True),
    sa.Column('reverse_chi2_token_seq_mean', sa.Double(), nullable=True),
    sa.Column('tv_token_seq_mean', sa.Double(), nullable=True),
    sa.Column('verl_chi2_token_seq_mean', sa.Double(), nullable=True),
    sa.Column('mean_ratio_seq_mean', sa.Double(), nullable=True),
    sa.Column('token_mult_prob_error_seq_mean', sa.Double(), nullable=True),
    sa.Column('log_ppl_diff', sa.Double(), nullable=True),
    sa.Column('log_ppl_abs_diff', sa.Double(), nullable=True),
    sa.Column('sequence_log_ppl_abs_diff', sa.Double(), nullable=True),
    sa.Column('geo_ratio', sa.Double(), nullable=True),
    sa.Column('verl_chi2_seq', sa.Double(), nullable=True),
    sa.Column('ess_turn', sa.Double(), nullable=True),
    sa.Column('ess_seq', sa.Double(), nullable=True),
    sa.Column('tokens', sa.Double(), nullable=True),
    sa.Column('rollouts', sa.Double(), nullable=True),
    sa.Column('incomplete_rollouts', sa.Double(), nullable=True),
    sa.Column('nonfinite_target', sa.Double(), nullable=True),
    sa.Column('nonfinite_behaviour', sa.Double(), nullable=True),
    sa.Column('num_rollouts', sa.Double(), nullable=True),
    sa.Column('num_tokens', sa.Double(), nullable=True),
    sa.Column('num_tool_tokens', sa.Double(), nullable=True),
    sa.Column('response_length_mean', sa.Double(), nullable=True),
    sa.Column('response_length_std', sa.Double(), nullable=True),
    sa.Column('response_length_p50', sa.Double(), nullable=True),
    sa.Column('response_length_p90', sa.Double(), nullable=True),
    sa.Column('response_length_p99', sa.Double(), nullable=True),
    sa.Column('response_length_min', sa.Double(), nullable=True),
    sa.Column('response_length_max', sa.Double(), nullable=True),
    sa.Column('prompt_length_mean', sa.Double(), nullable=True),
    sa.Column('truncated_fraction', sa.Double(), nullable=True),
    sa.Column('turns_mean', sa.Double(), nullable=True),
    sa.Column('reward_mean', sa.Double(), nullable=True),
    sa.Column('reward_std', sa.Double(), nullable=True),
    sa.Column('reward_min', sa.Double(), nullable=True),
    sa.Column('reward_max', sa.Double(), nullable=True),
    sa.Column('entropy_mean', sa.Double(), nullable=True),
    sa.Column('rollout_log_prob_mean', sa.Double(), nullable=True),
    sa.Column('trainer_log_prob_mean', sa.Double(), nullable=True),
    sa.Column('lag_mean', sa.Double(), nullable=True),
    sa.Column('lag_max', sa.Double(), nullable=True),
    sa.Column('nonfinite_log_probs', sa.Double(), nullable=True),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('computed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_measurements_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'comparison', name=op.f('pk_measurements'))
    )
    op.create_table('scalars',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('source', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('value', sa.Double(), nullable=True),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_scalars_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'source', 'name', name=op.f('pk_scalars'))
    )
    op.create_table('steps',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('expected_shards', sa.BigInteger(), nullable=False),
    sa.Column('received_shards', sa.BigInteger(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('first_shard_at_us', sa.BigInteger(), nullable=False),
    sa.Column('last_shard_at_us', sa.BigInteger(), nullable=False),
    sa.Column('closed_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name=op.f('fk_steps_run_id_attempt_attempts')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name=op.f('pk_steps'))
    )
    with op.batch_alter_table('steps', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_steps_closed_at_us_last_shard_at_us'), ['closed_at_us', 'last_shard_at_us'], unique=False)

    op.create_table('shards',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('body_bytes', sa.BigInteger(), nullable=False),
    sa.Column('file', sa.String(), nullable=False),
    sa.Column('file_bytes', sa.BigInteger(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=op.f('fk_shards_run_id_attempt_step_steps')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', name=op.f('pk_shards'))
    )
    op.create_table('shard_statistics',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('statistics', sa.LargeBinary(), nullable=False),
    sa.Column('summaries', sa.LargeBinary(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step', 'shard'], ['shards.run_id', 'shards.attempt', 'shards.step', 'shards.shard'], name=op.f('fk_shard_statistics_run_id_attempt_step_shard_shards')),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', 'comparison', name=op.f('pk_shard_statistics'))
    )


def downgrade() -> None:
    op.drop_table('shard_statistics')
    op.drop_table('shards')
    with op.batch_alter_table('steps', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_steps_closed_at_us_last_shard_at_us'))

    op.drop_table('steps')
    op.drop_table('scalars')
    op.drop_table('measurements')
    op.drop_table('measurement_statistics')
    op.drop_table('checkpoints')
    op.drop_table('attempts')
    with op.batch_alter_table('runs', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_runs_created_at_us_id'))

    op.drop_table('runs')
    op.drop_table('api_keys')
