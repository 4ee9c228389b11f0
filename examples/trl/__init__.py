"""A TRL trainer connected to Foreshock, small enough for two CPU cores."""
