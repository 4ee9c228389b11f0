"""Asynchronous training, logged with the weights version of each token; see docs/large-runs.md."""
