"""The experimenter of the doctor: torch replays under changed weights, positions, attention and configuration."""
