"""Foundations of the service: database, settings, security, HTTP helpers, store, decoder processes."""
