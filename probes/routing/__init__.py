"""Routed experts of mixtures of experts: recorded in torch and vLLM, compared in the worker.

`torch_routes` and `vllm_routes` record the experts that each response token's state was computed with; `recorded` has
the file that hands them to the worker, and compares them.
"""
