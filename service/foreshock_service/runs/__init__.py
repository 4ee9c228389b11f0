"""Runs: logged data and its measurements: runs, attempts, steps, rollouts, scalars, measurements, lint."""
