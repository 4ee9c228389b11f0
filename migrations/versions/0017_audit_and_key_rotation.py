"""The audit; expiry, last use and rotation of API keys; ended page sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0017'
down_revision = '0016'
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), 'postgresql')


def upgrade() -> None:
    op.add_column('api_keys', sa.Column('expires_at_us', sa.BigInteger(), nullable=True))
    op.add_column('api_keys', sa.Column('last_used_at_us', sa.BigInteger(), nullable=True))
    op.add_column('api_keys', sa.Column('sessions_from_us', sa.BigInteger(), nullable=False, server_default='0'))
    op.create_table(
        'retired_secrets',
        sa.Column('secret_hash', sa.String(), nullable=False),
        sa.Column('key_id', sa.String(), nullable=False),
        sa.Column('valid_until_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['key_id'], ['api_keys.id'], name=op.f('fk_retired_secrets_key_id_api_keys')),
        sa.PrimaryKeyConstraint('secret_hash', name=op.f('pk_retired_secrets')),
    )
    op.create_table(
        'ended_sessions',
        sa.Column('session_hash', sa.String(), nullable=False),
        sa.Column('expires_at_us', sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint('session_hash', name=op.f('pk_ended_sessions')),
    )
    op.create_index(op.f('ix_ended_sessions_expires_at_us'), 'ended_sessions', ['expires_at_us'])
    op.create_table(
        'audit_entries',
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
        sa.PrimaryKeyConstraint('id', name=op.f('pk_audit_entries')),
    )
    op.create_index(op.f('ix_audit_entries_at_us_id'), 'audit_entries', ['at_us', 'id'])
    op.create_index(op.f('ix_audit_entries_project_at_us_id'), 'audit_entries', ['project', 'at_us', 'id'])
    op.create_index(op.f('ix_audit_entries_run_id_at_us_id'), 'audit_entries', ['run_id', 'at_us', 'id'])
    if op.get_bind().dialect.name == 'sqlite':
        for change in ('UPDATE', 'DELETE'):
            op.execute(
                f"CREATE TRIGGER audit_entries_no_{change.lower()} BEFORE {change} ON audit_entries "
                "BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entries "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
    )


def downgrade() -> None:
    op.drop_table('audit_entries')
    if op.get_bind().dialect.name != 'sqlite':
        op.execute("DROP FUNCTION audit_is_append_only()")
    op.drop_index(op.f('ix_ended_sessions_expires_at_us'), 'ended_sessions')
    op.drop_table('ended_sessions')
    op.drop_table('retired_secrets')
    with op.batch_alter_table('api_keys') as table:
        table.drop_column('sessions_from_us')
        table.drop_column('last_used_at_us')
        table.drop_column('expires_at_us')
