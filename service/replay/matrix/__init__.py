"""The configuration matrix of a step: the same rollouts replayed with other options and on other hardware."""
