"""Scorers, which compute the log-prob of each response token. `foreshock.scorers` lists them; a family is a module."""
