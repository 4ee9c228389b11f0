"""Retention: which steps keep their tokens, and the purge of the others."""
