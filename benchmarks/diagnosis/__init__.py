"""Whether what Foreshock says of a run is true, where the truth is known: one module a family."""
