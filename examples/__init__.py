"""Runnable examples: a tiny real RL run, and the demo that logs its recording."""
