"""Mergeable statistics: sums over tokens and rollouts, how they merge, and how they are stored."""
