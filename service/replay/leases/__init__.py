"""Leases: how workers take jobs, keep them, and hand them back. `transitions` holds every rule."""
