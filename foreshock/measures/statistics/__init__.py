"""Mergeable statistics: what is summed over tokens and rollouts, how it merges, and how it is stored."""
