"""Routed experts of mixtures of experts: recorded in torch, vLLM and SGLang, compared in the worker.

`torch_routes`, `vllm_routes` and `sglang_routes` record the experts that computed each response token's state.
`recorded` writes them to a file for the worker, and compares them.
"""
