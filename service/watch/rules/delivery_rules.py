"""The names of the alert rules on delivery. The replay of the detectors does not touch their alerts."""

from __future__ import annotations

SPLIT_RANKS = "split_ranks"
INCOMPLETE_STEP = "incomplete_step"
CLIENT_LOSSES = "client_losses"
STALE_RUN = "stale_run"
DELIVERY_RULES = (SPLIT_RANKS, INCOMPLETE_STEP, CLIENT_LOSSES, STALE_RUN)
