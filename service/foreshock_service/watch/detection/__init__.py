"""The detectors of early warning, replayed over the closed steps of a run."""
