"""Columns of the measures that statistics of version 2 give; NULL until `foreshock remeasure` fills them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None

COLUMNS = (
    "p50_abs_d", "p90_abs_d", "pareto_k", "pareto_k_inverse", "pinsker_tv_bound", "tail_below_ln2",
    "tail_below_ln5", "tail_below_1", "tail_below_3", "tail_below_10", "tail_above_ln2", "tail_above_ln5",
    "tail_above_1", "tail_above_3", "tail_above_10", "tail_asymmetry_ln2", "tail_asymmetry_ln5",
    "tail_asymmetry_3", "tail_asymmetry_10", "chi2_token_low", "chi2_token_high", "reverse_chi2_token_low",
    "reverse_chi2_token_high", "tv_token_low", "tv_token_high", "k3_kl_bootstrap_low", "k3_kl_bootstrap_high",
    "chi2_token_bootstrap_low", "chi2_token_bootstrap_high", "tv_token_bootstrap_low",
    "tv_token_bootstrap_high", "ess_seq_predicted", "training_ppl", "training_log_ppl", "rollout_ppl",
    "rollout_log_ppl", "ppl_ratio", "log_ppl_diff_max", "log_ppl_diff_min", "advantage_d_cov",
    "advantage_skew_positive", "advantage_skew_negative", "advantage_skew", "bad_update_fraction",
)  # fmt: skip


def upgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name in COLUMNS:
            measurements.add_column(sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('measurements') as measurements:
        for name in COLUMNS:
            measurements.drop_column(name)
