"""Change what the service stores: `Operator` and its async twin."""
