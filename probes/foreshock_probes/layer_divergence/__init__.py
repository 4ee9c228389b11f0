"""Find where in the network two scorers diverge: compare their hidden states, layer by layer, over the same tokens."""
