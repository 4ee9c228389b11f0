"""Early warning: detectors over closed steps, alerts, and the learning-rate advice."""
