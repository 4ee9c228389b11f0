"""How fast the service answers reads, one module per bar, while it takes uploads."""
