"""Where in the network two scorers depart: their hidden states, layer by layer, over the same tokens.

The states of one scorer are kept in a file while the other one computes its own; only sums of distances per rollout
leave the engine's process.
"""
