"""Probes: requests to replay a step's rollouts through named scorers, each cut into one job per engine."""
