"""Routed experts of mixtures of experts: recorded in torch, vLLM and SGLang, compared in the worker.

`torch_routes`, `vllm_routes` and `sglang_routes` record the experts that each response token's state was computed
with; `recorded` has the file that hands them to the worker, and compares them.
"""
