"""Benchmark of the length-surge detector: `make bench-detector`."""
