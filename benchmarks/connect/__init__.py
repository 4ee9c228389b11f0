"""Benchmarks of connecting a trainer: the parts of `make bench-connect`."""
