"""Findings: what the service has concluded from the stored data of runs, by run, source and name."""
