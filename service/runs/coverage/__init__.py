"""Coverage: how many rollouts of a step are stored in full, and what an answer rests on."""
