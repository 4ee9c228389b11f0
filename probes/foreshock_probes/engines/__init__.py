"""Engines in processes of their own, so that a crash, a leak or stale state of an engine cannot harm the worker.

`process` is the worker's side: it starts a process for the tasks of a job (`foreshock_probes.score`) and reads their
results. `environment` restricts a process to a lower instruction set.
"""
