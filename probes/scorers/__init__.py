"""Scorers, which compute the log-prob of each response token. `table` lists them; each family has a module."""
