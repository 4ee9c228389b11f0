"""The documentation site: its sources are docs/, the README and what the code says of itself."""
