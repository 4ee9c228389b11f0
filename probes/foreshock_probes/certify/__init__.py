"""Certify that an engine is the same policy as a trainer's forward pass, before a run: ask both under conditions."""
