"""The benchmark of collapses: many tiny, real RL runs over a grid of mismatch, learning rate and seed."""
