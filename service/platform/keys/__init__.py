"""API keys: made, listed and revoked by `foreshock keys`."""
