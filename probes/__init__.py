"""Workers that replay rollouts through real engines.

The way of a probe: `worker` leases a job over HTTP (`service_client`), finds and checks the weights (`weights`), hands
the rollouts to an engine in its own process (`engines`), where a scorer (`scorers`) gives each response token a
log-prob, and uploads the scores with the fingerprint of what made them (`fingerprints`).
"""
