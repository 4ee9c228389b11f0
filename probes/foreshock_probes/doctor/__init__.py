"""The experimenter of the doctor: replays in torch under changed weights, positions, attention and configuration."""
