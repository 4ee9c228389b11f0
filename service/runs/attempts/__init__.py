"""Attempts: a run's start and its resumes."""
