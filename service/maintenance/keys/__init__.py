"""API keys: made, listed, rotated and revoked by `foreshock keys`."""
