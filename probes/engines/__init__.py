"""Engines in processes of their own, so that a crash, a leak or stale state of an engine cannot harm the worker.

`protocol` has the messages, `process` the worker's side and `serving` the engine's side, where `forking` starts a
process for each model. `pool` keeps processes warm between jobs. `environment` restricts a process to a lower
instruction set.
"""
