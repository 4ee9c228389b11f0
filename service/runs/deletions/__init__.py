"""Deletions: requests to delete rollouts of a run by their ids. `service/maintenance/deletion` carries them out."""
