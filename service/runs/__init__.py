"""What trainers log and what is measured of it: runs, attempts, steps, rollouts, scalars, measurements, lint."""
