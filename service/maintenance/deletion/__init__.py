"""Deletion: the rows of deleted runs, and rollouts by their ids."""
