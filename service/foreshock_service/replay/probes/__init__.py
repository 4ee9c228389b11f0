"""Probes: requests to replay a step's rollouts through named scorers, and the jobs that workers do for them."""
