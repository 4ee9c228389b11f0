"""Comparisons of routed experts: sent by workers, published when their job is complete, read by step."""
