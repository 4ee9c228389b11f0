"""Theory: what the bounds of the papers come to at a step, and which of them say nothing there."""
