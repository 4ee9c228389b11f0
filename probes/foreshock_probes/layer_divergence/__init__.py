"""Find where in the network two scorers diverge: compare their hidden states, layer by layer, over the same tokens.

The states of one scorer are kept in a file while the other scorer computes its own; only sums of distances per rollout
leave the engine's process.
"""
