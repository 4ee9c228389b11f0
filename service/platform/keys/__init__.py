"""API keys: what they are, their limits and their last use."""
