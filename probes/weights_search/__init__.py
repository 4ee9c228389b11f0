"""The weights search: replay a step with the weights of other announced steps, whole and by part."""
