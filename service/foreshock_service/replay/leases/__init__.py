"""Leases: a worker claims a job, keeps it by heartbeats, and gives it back."""
