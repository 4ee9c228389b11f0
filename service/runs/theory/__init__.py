"""Theory: the values of the papers' bounds at a step, and which of them are vacuous there."""
