"""Weights searches: sent by workers beside the scores of their job, published with them, read by step."""
