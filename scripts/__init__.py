"""Programs that generate and check parts of the repository."""
