"""The audit: an append-only record of who changed advice, alerts, runs and keys."""
