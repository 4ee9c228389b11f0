"""Advice: the state of the learning-rate schedule that trainers poll, kept as an append-only log of decisions."""
