"""Tests of the policies of automatic probes."""
