"""Policies: which steps of a run are probed automatically, and what that may cost."""
