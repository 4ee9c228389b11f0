"""Really injected faults, and whether the doctor names them."""
