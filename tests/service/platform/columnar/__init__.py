"""Tests of columnar answers."""
