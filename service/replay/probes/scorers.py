"""The scorers that a probe may ask for, and which engine does each."""

from __future__ import annotations

# Named engine.way: the engine is what a worker keeps in one process, so a probe is cut into one job per engine.
SCORERS: dict[str, str] = {
    "vllm.decode": "vLLM, forced through decode one token at a time",
    "vllm.prefill": "vLLM, prompt and response in one prefill",
    "torch.trainer": "a torch forward pass set up as the trainer's (precision and master weights by its options)",
    "torch.bfloat16": "a torch forward pass, weights and activations in bfloat16",
    "torch.float32": "a torch forward pass in float32: the nearest to the truth that is affordable",
}

# The same scorer again, with another composition of its batches: the scorer's own noise.
REBATCHED = "rebatched"
VARIANTS = ("", REBATCHED)


def engine_of(scorer: str) -> str:
    """The part of a scorer's name before the dot."""
    return scorer.partition(".")[0]
