"""Semantics lint of uploaded rollouts: checks that the log-probs are the quantity that they are declared to be."""
