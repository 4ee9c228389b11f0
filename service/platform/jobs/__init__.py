"""Background work of the service: periodic jobs, each done by one process at a time."""
