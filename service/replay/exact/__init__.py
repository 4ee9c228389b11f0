"""Exact divergences of pairs of scorers: uploaded by workers, checked, measured, and published with their job."""
