"""Workers that replay rollouts through real engines.

`worker` leases a job over HTTP (`service_client`), verifies the weights (`weights`) and passes the rollouts to an
engine in its own process (`engines`). There a scorer (`scorers`) computes the log-prob of each response token. The
worker uploads the scores with a fingerprint of their environment. `exact_divergence` compares whole distributions
instead of sampled tokens.
"""
