"""Alerts: the detectors run over every closed step, and what fires is kept until it is resolved or retracted."""
