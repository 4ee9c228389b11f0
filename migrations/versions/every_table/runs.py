"""Keys, the audit, runs, attempts, steps and the catalogue of their shards."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def create() -> None:
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

    op.create_table('retired_secrets',
    sa.Column('secret_hash', sa.String(), nullable=False),
    sa.Column('key_id', sa.String(), nullable=False),
    sa.Column('valid_until_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['key_id'], ['api_keys.id'], name='fk_retired_secrets_key_id_api_keys'),
    sa.PrimaryKeyConstraint('secret_hash', name='pk_retired_secrets')
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
