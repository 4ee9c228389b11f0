"""One table for the results of probes that are documents."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0042'
down_revision = '0041'
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_COLUMNS = "job_id, token, run_id, attempt, step, document, published_at_us"
_MOVED = {
    "weights_searches": "'weights', ''",
    "layer_comparisons": "'layers', pair",
    "routing_comparisons": "'routing', pair",
}


def upgrade() -> None:
    op.create_table('probe_results',
    sa.Column('job_id', sa.String(), nullable=False),
    sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('run_id', sa.String(), nullable=False),
    sa.Column('attempt', sa.BigInteger(), nullable=False),
    sa.Column('step', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(), nullable=False),
    sa.Column('pair', sa.String(), nullable=False),
    sa.Column('document', JSON, nullable=False),
    sa.Column('published_at_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name='fk_probe_results_job_id_probe_jobs'),
    sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name='fk_probe_results_run_id_attempt_step_steps'),
    sa.PrimaryKeyConstraint('job_id', 'token', name='pk_probe_results')
    )
    op.create_index('ix_probe_results_run_id_attempt_step_kind_published_at_us', 'probe_results', ['run_id', 'attempt', 'step', 'kind', 'published_at_us'])
    for table, values in _MOVED.items():
        op.execute(f"INSERT INTO probe_results ({_COLUMNS}, kind, pair) SELECT {_COLUMNS}, {values} FROM {table}")
        op.drop_table(table)


def downgrade() -> None:
    own = {
        "weights_searches": [],
        "layer_comparisons": [sa.Column('pair', sa.String(), nullable=False)],
        "routing_comparisons": [
            sa.Column('pair', sa.String(), nullable=False),
            sa.Column('rollouts', sa.BigInteger(), nullable=False),
            sa.Column('tokens', sa.BigInteger(), nullable=False),
            sa.Column('from_sample', sa.Boolean(), nullable=False),
        ],
    }
    of_probe = "JOIN probe_jobs ON probe_jobs.id = job_id JOIN probes ON probes.id = probe_jobs.probe_id"
    for table, columns in own.items():
        op.create_table(table, *columns,
        sa.Column('job_id', sa.String(), nullable=False),
        sa.Column('token', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('document', JSON, nullable=False),
        sa.Column('published_at_us', sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(['job_id'], ['probe_jobs.id'], name=f'fk_{table}_job_id_probe_jobs'),
        sa.ForeignKeyConstraint(['run_id', 'attempt', 'step'], ['steps.run_id', 'steps.attempt', 'steps.step'], name=f'fk_{table}_run_id_attempt_step_steps'),
        sa.PrimaryKeyConstraint('job_id', 'token', name=f'pk_{table}')
        )
        op.create_index(f'ix_{table}_run_id_attempt_step_published_at_us', table, ['run_id', 'attempt', 'step', 'published_at_us'])
        kind = _MOVED[table].split(",")[0]
        moved = [*(f"probe_results.{name}" for name in _COLUMNS.split(", "))]
        moved += [f"{'probe_results' if column.name == 'pair' else 'probes'}.{column.name}" for column in columns]
        names = ", ".join([_COLUMNS, *(column.name for column in columns)])
        op.execute(f"INSERT INTO {table} ({names}) SELECT {', '.join(moved)} FROM probe_results {of_probe} WHERE probe_results.kind = {kind}")
    op.drop_table('probe_results')
