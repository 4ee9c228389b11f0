"""Measurements: all measures of one comparison at one step, as curves, buckets and single tokens."""
