"""Comparisons by layer: sent by workers, published when their job is complete, read by step."""
