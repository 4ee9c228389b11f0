"""Scorers: what gives each response token of a rollout a log-prob. `table` names them all, a file holds each family."""
