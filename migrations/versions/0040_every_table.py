"""Every table.

Until release 0.1 a change of a table class in `service/platform/database/tables` is made here as well.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from foreshock_service.platform.database.tables.base import make_append_only

revision = '0040'
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table('api_keys',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('project', sa.String(), nullable=True),
    sa.Column('scopes', JSON, nullable=False),
    sa.Column('secret_hash', sa.String(), nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.Column('revoked_at_us', sa.BigInteger(), nullable=True),
    sa.Column('expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('last_used_at_us', sa.BigInteger(), nullable=True),
    sa.Column('sessions_from_us', sa.BigInteger(), server_default='0', nullable=False),
    sa.PrimaryKeyConstraint('id', name='pk_api_keys'),
    sa.UniqueConstraint('secret_hash', name='uq_api_keys_secret_hash')
    )
    op.create_table('audit_entries',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('at_us', sa.BigInteger(), nullable=False),
    sa.Column('actor', sa.String(), nullable=False),
    sa.Column('action', sa.String(), nullable=False),
    sa.Column('subject', sa.String(), nullable=False),
    sa.Column('project', sa.String(), nullable=True),
    sa.Column('run_id', sa.String(), nullable=True),
    sa.Column('before', JSON, nullable=True),
    sa.Column('after', JSON, nullable=True),
    sa.Column('request_id', sa.String(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_audit_entries')
    )
    op.create_index('ix_audit_entries_at_us_id', 'audit_entries', ['at_us', 'id'])
    op.create_index('ix_audit_entries_project_at_us_id', 'audit_entries', ['project', 'at_us', 'id'])
    op.create_index('ix_audit_entries_run_id_at_us_id', 'audit_entries', ['run_id', 'at_us', 'id'])

    op.create_table('ended_sessions',
    sa.Column('session_hash', sa.String(), nullable=False),
    sa.Column('expires_at_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('session_hash', name='pk_ended_sessions')
    )
    op.create_index('ix_ended_sessions_expires_at_us', 'ended_sessions', ['expires_at_us'])

    op.create_table('file_removals',
    sa.Column('file', sa.String(), nullable=False),
    sa.Column('file_bytes', sa.BigInteger(), nullable=False),
    sa.Column('reason', sa.String(), nullable=False),
    sa.Column('due_at_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('file', name='pk_file_removals')
    )
    op.create_index('ix_file_removals_due_at_us', 'file_removals', ['due_at_us'])

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
    sa.Column('declared_model_kind', sa.String(), nullable=True),
    sa.Column('derived_model_kind', sa.String(), nullable=True),
    sa.Column('advice_mode', sa.String(), nullable=False),
    sa.Column('state', sa.String(), nullable=False),
    sa.Column('last_step', sa.BigInteger(), nullable=True),
    sa.Column('rollouts', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('tokens', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('last_shard_at_us', sa.BigInteger(), nullable=True),
    sa.Column('seen_at_us', sa.BigInteger(), nullable=True),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.Column('updated_at_us', sa.BigInteger(), nullable=False),
    sa.Column('deleted_at_us', sa.BigInteger(), nullable=True),
    sa.Column('rows_removed_at_us', sa.BigInteger(), nullable=True),
    sa.Column('deletions', sa.BigInteger(), server_default='0', nullable=False),
    sa.Column('retention', JSON, nullable=True),
    sa.Column('scalar_names', JSON, nullable=True),
    sa.Column('rules_version', sa.BigInteger(), nullable=True),
    sa.PrimaryKeyConstraint('id', name='pk_runs'),
    sa.UniqueConstraint('project', 'key', name='uq_runs_project_key')
    )
    op.create_index('ix_runs_created_at_us_id', 'runs', ['created_at_us', 'id'])

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
    op.create_table('attempts',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('key', sa.String(), nullable=False),
    sa.Column('resume_step', sa.BigInteger(), nullable=False),
    sa.Column('fingerprint', JSON, nullable=False),
    sa.Column('created_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_attempts_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_attempts'),
    sa.UniqueConstraint('run_id', 'key', name='uq_attempts_run_id_key')
    )
    op.create_table('deletions',
    sa.Column('id', sa.String(), nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('sample_digests', JSON, nullable=False),
    sa.Column('group_digests', JSON, nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('steps', sa.BigInteger(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('files', sa.BigInteger(), nullable=False),
    sa.Column('requested_at_us', sa.BigInteger(), nullable=False),
    sa.Column('finished_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_deletions_run_id_runs'),
    sa.PrimaryKeyConstraint('id', name='pk_deletions')
    )
    op.create_index('ix_deletions_finished_at_us', 'deletions', ['finished_at_us'])
    op.create_index('ix_deletions_run_id_requested_at_us', 'deletions', ['run_id', 'requested_at_us'])

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

    op.create_table('probe_policies',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('policy', JSON, nullable=False),
    sa.Column('changed_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_probe_policies_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', name='pk_probe_policies')
    )
    op.create_table('retired_secrets',
    sa.Column('secret_hash', sa.String(), nullable=False),
    sa.Column('key_id', sa.String(), nullable=False),
    sa.Column('valid_until_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['key_id'], ['api_keys.id'], name='fk_retired_secrets_key_id_api_keys'),
    sa.PrimaryKeyConstraint('secret_hash', name='pk_retired_secrets')
    )
    op.create_table('rules_versions',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('version', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('effective_from_step', sa.BigInteger(), nullable=False),
    sa.Column('toml', sa.String(), nullable=False),
    sa.Column('made_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_rules_versions_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'version', name='pk_rules_versions')
    )
    op.create_table('run_setups',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('number', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('setup', sa.String(), nullable=False),
    sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_run_setups_run_id_runs'),
    sa.PrimaryKeyConstraint('run_id', 'number', name='pk_run_setups'),
    sa.UniqueConstraint('run_id', 'digest', name='uq_run_setups_run_id_digest')
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

    op.create_table('announced_changes',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('note', sa.String(), nullable=True),
    sa.Column('values', JSON, nullable=False),
    sa.Column('announced_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_announced_changes_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'kind', name='pk_announced_changes')
    )
    op.create_table('attempt_clients',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('client', sa.String(), nullable=False),
    sa.Column('shard', sa.BigInteger(), nullable=True),
    sa.Column('undelivered', sa.BigInteger(), nullable=False),
    sa.Column('rejected', sa.BigInteger(), nullable=False),
    sa.Column('dropped', sa.BigInteger(), nullable=False),
    sa.Column('invalid', sa.BigInteger(), nullable=False),
    sa.Column('reason', sa.String(), nullable=True),
    sa.Column('seen_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_attempt_clients_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'client', name='pk_attempt_clients')
    )
    op.create_index('ix_attempt_clients_run_id_seen_at_us', 'attempt_clients', ['run_id', 'seen_at_us'])

    op.create_table('checkpoints',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('root', sa.String(), nullable=False),
    sa.Column('path', sa.String(), nullable=False),
    sa.Column('format', sa.String(), nullable=False),
    sa.Column('digest', sa.String(), nullable=False),
    sa.Column('model_kind', sa.String(), nullable=True),
    sa.Column('weights_version', sa.BigInteger(), nullable=True),
    sa.Column('expires_at_us', sa.BigInteger(), nullable=True),
    sa.Column('announced_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_checkpoints_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_checkpoints')
    )
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
    sa.Column('p50_abs_d', sa.Double(), nullable=True),
    sa.Column('p90_abs_d', sa.Double(), nullable=True),
    sa.Column('p99_abs_d', sa.Double(), nullable=True),
    sa.Column('p999_abs_d', sa.Double(), nullable=True),
    sa.Column('max_abs_d', sa.Double(), nullable=True),
    sa.Column('min_d', sa.Double(), nullable=True),
    sa.Column('max_d', sa.Double(), nullable=True),
    sa.Column('low_probability_abs_d', sa.Double(), nullable=True),
    sa.Column('zero_fraction', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_mean', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_max', sa.Double(), nullable=True),
    sa.Column('rollout_probs_diff_std', sa.Double(), nullable=True),
    sa.Column('rollout_actor_probs_pearson_corr', sa.Double(), nullable=True),
    sa.Column('ess_token', sa.Double(), nullable=True),
    sa.Column('pareto_k', sa.Double(), nullable=True),
    sa.Column('pareto_k_inverse', sa.Double(), nullable=True),
    sa.Column('pinsker_tv_bound', sa.Double(), nullable=True),
    sa.Column('tail_2', sa.Double(), nullable=True),
    sa.Column('tail_5', sa.Double(), nullable=True),
    sa.Column('tail_10', sa.Double(), nullable=True),
    sa.Column('tail_below_ln2', sa.Double(), nullable=True),
    sa.Column('tail_below_ln5', sa.Double(), nullable=True),
    sa.Column('tail_below_1', sa.Double(), nullable=True),
    sa.Column('tail_below_3', sa.Double(), nullable=True),
    sa.Column('tail_below_10', sa.Double(), nullable=True),
    sa.Column('tail_above_ln2', sa.Double(), nullable=True),
    sa.Column('tail_above_ln5', sa.Double(), nullable=True),
    sa.Column('tail_above_1', sa.Double(), nullable=True),
    sa.Column('tail_above_3', sa.Double(), nullable=True),
    sa.Column('tail_above_10', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_ln2', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_ln5', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_1', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_3', sa.Double(), nullable=True),
    sa.Column('tail_asymmetry_10', sa.Double(), nullable=True),
    sa.Column('k3_kl_per_entropy', sa.Double(), nullable=True),
    sa.Column('surprisal_z', sa.Double(), nullable=True),
    sa.Column('kl_low', sa.Double(), nullable=True),
    sa.Column('kl_high', sa.Double(), nullable=True),
    sa.Column('k3_kl_low', sa.Double(), nullable=True),
    sa.Column('k3_kl_high', sa.Double(), nullable=True),
    sa.Column('chi2_token_low', sa.Double(), nullable=True),
    sa.Column('chi2_token_high', sa.Double(), nullable=True),
    sa.Column('reverse_chi2_token_low', sa.Double(), nullable=True),
    sa.Column('reverse_chi2_token_high', sa.Double(), nullable=True),
    sa.Column('tv_token_low', sa.Double(), nullable=True),
    sa.Column('tv_token_high', sa.Double(), nullable=True),
    sa.Column('k3_kl_bootstrap_low', sa.Double(), nullable=True),
    sa.Column('k3_kl_bootstrap_high', sa.Double(), nullable=True),
    sa.Column('chi2_token_bootstrap_low', sa.Double(), nullable=True),
    sa.Column('chi2_token_bootstrap_high', sa.Double(), nullable=True),
    sa.Column('tv_token_bootstrap_low', sa.Double(), nullable=True),
    sa.Column('tv_token_bootstrap_high', sa.Double(), nullable=True),
    sa.Column('effective_groups', sa.Double(), nullable=True),
    sa.Column('k3_kl_interval_reliable', sa.Double(), nullable=True),
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
    sa.Column('ess_seq_predicted', sa.Double(), nullable=True),
    sa.Column('training_ppl', sa.Double(), nullable=True),
    sa.Column('training_log_ppl', sa.Double(), nullable=True),
    sa.Column('rollout_ppl', sa.Double(), nullable=True),
    sa.Column('rollout_log_ppl', sa.Double(), nullable=True),
    sa.Column('ppl_ratio', sa.Double(), nullable=True),
    sa.Column('log_ppl_diff_max', sa.Double(), nullable=True),
    sa.Column('log_ppl_diff_min', sa.Double(), nullable=True),
    sa.Column('advantage_d_cov', sa.Double(), nullable=True),
    sa.Column('advantage_skew_positive', sa.Double(), nullable=True),
    sa.Column('advantage_skew_negative', sa.Double(), nullable=True),
    sa.Column('advantage_skew', sa.Double(), nullable=True),
    sa.Column('bad_update_fraction', sa.Double(), nullable=True),
    sa.Column('tokens', sa.Double(), nullable=True),
    sa.Column('low_probability_tokens', sa.Double(), nullable=True),
    sa.Column('rollouts', sa.Double(), nullable=True),
    sa.Column('prompt_groups', sa.Double(), nullable=True),
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
    op.create_table('steps',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('expected_shards', sa.BigInteger(), nullable=False),
    sa.Column('received_shards', sa.BigInteger(), nullable=False),
    sa.Column('folded_shards', sa.BigInteger(), nullable=False),
    sa.Column('rollouts', sa.BigInteger(), nullable=False),
    sa.Column('tokens', sa.BigInteger(), nullable=False),
    sa.Column('full_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('full_tokens', sa.BigInteger(), nullable=True),
    sa.Column('setups', sa.String(), nullable=True),
    sa.Column('first_shard_at_us', sa.BigInteger(), nullable=False),
    sa.Column('last_shard_at_us', sa.BigInteger(), nullable=False),
    sa.Column('closed_at_us', sa.BigInteger(), nullable=True),
    sa.Column('tokens_purged_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_steps_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', name='pk_steps')
    )
    op.create_index('ix_steps_incomplete', 'steps', ['run_id', 'attempt', 'step'], sqlite_where=sa.text('closed_at_us IS NOT NULL AND received_shards < expected_shards'), postgresql_where=sa.text('closed_at_us IS NOT NULL AND received_shards < expected_shards'))
    op.create_index('ix_steps_sent_as_statistics', 'steps', ['run_id', 'attempt', 'step'], sqlite_where=sa.text('full_rollouts IS NOT NULL'), postgresql_where=sa.text('full_rollouts IS NOT NULL'))
    op.create_index('ix_steps_unfolded', 'steps', ['last_shard_at_us'], sqlite_where=sa.text('folded_shards < received_shards'), postgresql_where=sa.text('folded_shards < received_shards'))

    op.create_table('trainer_progress',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('polled_step', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt'], ['attempts.run_id', 'attempts.attempt'], name='fk_trainer_progress_run_id_attempt_attempts'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', name='pk_trainer_progress')
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
    sa.Column('full_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('full_tokens', sa.BigInteger(), nullable=True),
    sa.Column('sampled_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('deleted_rollouts', sa.BigInteger(), nullable=True),
    sa.Column('tokens_removed', sa.String(), nullable=True),
    sa.Column('tokens_changed_at_us', sa.BigInteger(), nullable=True),
    sa.Column('rollout_set_digest', sa.String(), nullable=False),
    sa.Column('received_at_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_shards_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', name='pk_shards')
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
    op.create_table('shard_statistics',
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('shard', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('comparison', sa.String(), nullable=False),
    sa.Column('statistics_version', sa.BigInteger(), nullable=False),
    sa.Column('statistics', sa.LargeBinary(), nullable=True),
    sa.Column('summaries', sa.LargeBinary(), nullable=True),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step', 'shard'], ['shards.run_id', 'shards.attempt', 'shards.step', 'shards.shard'], name='fk_shard_statistics_run_id_attempt_step_shard_shards'),
    sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'shard', 'comparison', name='pk_shard_statistics')
    )
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
    make_append_only(op.get_bind())


def downgrade() -> None:
    raise NotImplementedError("there is no schema before the first one")
