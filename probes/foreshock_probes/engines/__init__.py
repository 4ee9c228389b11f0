"""Engines in processes of their own, so that a crash, a leak or stale state of an engine cannot harm the worker.

`protocol` has the messages, `process` the worker's side, which keeps processes warm between jobs, and `serving` the
engine's side, where `forking` starts a process for each model. `environment` restricts a process to a lower instruction
set.
"""
