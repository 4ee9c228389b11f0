"""Engines in processes of their own, so that a crash, a leak or a stale state of one never reaches the worker.

`protocol` is what the two sides say, `process` the worker's side, `__main__` the engine's side
(`python -m probes.engines vllm`): `serving` does commands, `forking` gives each model a process. `pool` keeps processes
warm. `environment` holds a process to a lower instruction set.
"""
