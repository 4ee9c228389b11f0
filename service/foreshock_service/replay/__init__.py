"""Probes: jobs that replay rollouts, their leases, the scores that workers upload, and the attribution made of them."""
