"""Maintenance commands, which work on everything that is stored."""
