"""Changing what the service has: `Operator` and its async twin."""
