"""Measurements, scalars and lint; detection, alerts, advice and notifications."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

MEASURES = (
    "kl", "k2_kl", "k3_kl", "chi2_token", "reverse_chi2_token", "tv_token", "verl_chi2_token", "mean_ratio",
    "token_mult_prob_error", "mean_abs_d", "rms_d", "p50_abs_d", "p90_abs_d", "p99_abs_d", "p999_abs_d",
    "max_abs_d", "min_d", "max_d", "low_probability_abs_d", "zero_fraction", "rollout_probs_diff_mean",
    "rollout_probs_diff_max", "rollout_probs_diff_std", "rollout_actor_probs_pearson_corr", "ess_token", "pareto_k",
    "pareto_k_inverse", "pinsker_tv_bound", "tail_2", "tail_5", "tail_10", "tail_below_ln2", "tail_below_ln5",
    "tail_below_1", "tail_below_3", "tail_below_10", "tail_above_ln2", "tail_above_ln5", "tail_above_1",
    "tail_above_3", "tail_above_10", "tail_asymmetry_ln2", "tail_asymmetry_ln5", "tail_asymmetry_1",
    "tail_asymmetry_3", "tail_asymmetry_10", "k3_kl_per_entropy", "surprisal_z", "kl_low", "kl_high", "k3_kl_low",
    "k3_kl_high", "chi2_token_low", "chi2_token_high", "reverse_chi2_token_low", "reverse_chi2_token_high",
    "tv_token_low", "tv_token_high", "k3_kl_bootstrap_low", "k3_kl_bootstrap_high", "chi2_token_bootstrap_low",
    "chi2_token_bootstrap_high", "tv_token_bootstrap_low", "tv_token_bootstrap_high", "effective_groups",
    "k3_kl_interval_reliable", "kl_seq_mean", "k2_kl_seq_mean", "k3_kl_seq_mean", "chi2_token_seq_mean",
    "reverse_chi2_token_seq_mean", "tv_token_seq_mean", "verl_chi2_token_seq_mean", "mean_ratio_seq_mean",
    "token_mult_prob_error_seq_mean", "log_ppl_diff", "log_ppl_abs_diff", "sequence_log_ppl_abs_diff", "geo_ratio",
    "verl_chi2_seq", "ess_turn", "ess_seq", "ess_seq_predicted", "training_ppl", "training_log_ppl", "rollout_ppl",
    "rollout_log_ppl", "ppl_ratio", "log_ppl_diff_max", "log_ppl_diff_min", "advantage_d_cov",
    "advantage_skew_positive", "advantage_skew_negative", "advantage_skew", "bad_update_fraction", "tokens",
    "low_probability_tokens", "rollouts", "prompt_groups", "incomplete_rollouts", "nonfinite_target",
    "nonfinite_behaviour", "num_rollouts", "num_tokens", "num_tool_tokens", "response_length_mean",
    "response_length_std", "response_length_p50", "response_length_p90", "response_length_p99",
    "response_length_min", "response_length_max", "prompt_length_mean", "truncated_fraction", "turns_mean",
    "reward_mean", "reward_std", "reward_min", "reward_max", "entropy_mean", "rollout_log_prob_mean",
    "trainer_log_prob_mean", "lag_mean", "lag_max", "nonfinite_log_probs",
)


def create() -> None:
    op.create_table('notifications',
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
    sa.PrimaryKeyConstraint('id', name='pk_notifications'),
    sa.UniqueConstraint('target', 'alert_id', 'change', name='uq_notifications_target_alert_id_change')
    )
    op.create_index('ix_notifications_target_state_due_at_us', 'notifications', ['target', 'state', 'due_at_us'])

    op.create_table('advice_decisions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('revision', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('effective_from_step', sa.BigInteger(), nullable=False),
    sa.Column('reason', sa.String(), nullable=False),
    sa.Column('author', sa.String(), nullable=False),
    sa.Column('made_at_us', sa.BigInteger(), nullable=False),
    sa.Column('decision', JSON, nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_advice_decisions_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'revision', name='pk_advice_decisions')
    )

    op.create_table('due_findings',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('source', sa.String(), nullable=False),
    sa.Column('changes', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_due_findings_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'source', name='pk_due_findings')
    )

    op.create_table('due_replays',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('from_step', sa.BigInteger(), nullable=False),
    sa.Column('changed_step', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_due_replays_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', name='pk_due_replays')
    )

    op.create_table('findings',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('source', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('severity', sa.String(), nullable=False),
    sa.Column('title', sa.String(), nullable=False),
    sa.Column('sentence', sa.String(), nullable=False),
    sa.Column('remedy', sa.String(), nullable=True),
    sa.Column('steps', sa.BigInteger(), nullable=False),
    sa.Column('first_step', sa.BigInteger(), nullable=False),
    sa.Column('newest_step', sa.BigInteger(), nullable=False),
    sa.Column('confidence', JSON, nullable=True),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_findings_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'source', 'name', name='pk_findings')
    )
    op.create_index('ix_findings_changed_at_us_run_id_source_name', 'findings', ['changed_at_us', 'run_id', 'source', 'name'])

    op.create_table('rules_versions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('version', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('effective_from_step', sa.BigInteger(), nullable=False),
    sa.Column('toml', sa.String(), nullable=False),
    sa.Column('made_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_rules_versions_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'version', name='pk_rules_versions')
    )

    op.create_table('scalar_tails',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.Column('closed', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_scalar_tails_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', name='pk_scalar_tails')
    )

    op.create_table('advice_acknowledgements',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.Column('applied_learning_rate', sa.Double(), nullable=False),
    sa.Column('applied_scale', sa.Double(), nullable=True),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_advice_acknowledgements_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_advice_acknowledgements')
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
    sa.Column('evidence', JSON, nullable=False),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('cleared_step', sa.BigInteger(), nullable=True),
    sa.Column('changed_by', sa.String(), nullable=False),
    sa.Column('version', sa.BigInteger(), nullable=False),
    sa.Column('opened_at_us', sa.BigInteger(), nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_alerts_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('id', name='pk_alerts'),
    sa.UniqueConstraint('run_id', 'attempt', 'rule', 'step', name='uq_alerts_run_id_attempt_rule_step')
    )
    op.create_index('ix_alerts_changed_at_us', 'alerts', ['changed_at_us'])
    op.create_index('ix_alerts_run_id_cleared_step', 'alerts', ['run_id', 'cleared_step'])
    op.create_index('ix_alerts_run_id_state', 'alerts', ['run_id', 'state'])
    op.create_index('ix_alerts_run_id_step', 'alerts', ['run_id', 'step'])
    op.create_index('ix_alerts_run_id_version', 'alerts', ['run_id', 'version'])

    op.create_table('detector_snapshots',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('configuration_digest', sa.String(), nullable=False),
    sa.Column('milestone', sa.Boolean(), nullable=False),
    sa.Column('state', sa.LargeBinary(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_detector_snapshots_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_detector_snapshots')
    )
    op.create_index('ix_detector_snapshots_run_id_milestone_step', 'detector_snapshots', ['run_id', 'milestone', 'step'])
    op.create_index('ix_detector_snapshots_run_id_step', 'detector_snapshots', ['run_id', 'step'])

    op.create_table('measurement_statistics',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('statistics', sa.LargeBinary(), nullable=False),
    sa.Column('summaries', sa.LargeBinary(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_measurement_statistics_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'comparison', name='pk_measurement_statistics')
    )

    op.create_table('measurements',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    *(sa.Column(name, sa.Double(), nullable=True) for name in MEASURES),
    sa.Column('from_sample', sa.Boolean(), nullable=False),
    sa.Column('computed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_measurements_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'comparison', name='pk_measurements')
    )

    op.create_table('newest_measurements',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.Column('rewritten', sa.BigInteger(), nullable=False),
    sa.Column('buckets', sa.LargeBinary(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_newest_measurements_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'comparison', name='pk_newest_measurements')
    )

    op.create_table('scalars',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('source', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('value', sa.Double(), nullable=True),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_scalars_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'source', 'name', name='pk_scalars')
    )

    op.create_table('trainer_progress',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('polled_step', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_trainer_progress_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_trainer_progress')
    )

    op.create_table('step_lint',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('severity', sa.String(), nullable=True),
    sa.Column('warnings', JSON, nullable=False),
    sa.Column('report', sa.LargeBinary(), nullable=False),
    sa.Column('surprisal_tokens', sa.BigInteger(), nullable=False),
    sa.Column('surprisal', sa.Double(), nullable=False),
    sa.Column('entropy', sa.Double(), nullable=False),
    sa.Column('surprisal_variance', sa.Double(), nullable=False),
    sa.Column('largest_surprisal', sa.Double(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_step_lint_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_step_lint')
    )
    op.create_index('ix_step_lint_run_id_severity', 'step_lint', ['run_id', 'severity'])

    op.create_table('shard_lint',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('evidence', sa.LargeBinary(), nullable=False),
    sa.Column('examples', JSON, nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step', 'shard'], ['shards.run_id', 'shards.attempt', 'shards.step', 'shards.shard'], name='fk_shard_lint_run_id_attempt_step_shard_shards'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', name='pk_shard_lint')
    )
