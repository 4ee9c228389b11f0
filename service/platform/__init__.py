"""What every part of the service stands on: database, settings, security, HTTP helpers, store, decoder processes."""
