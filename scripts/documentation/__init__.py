"""The documentation site: its sources are docs/, the README and the docstrings and schemas of the code."""
