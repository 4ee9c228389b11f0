"""News of changed runs: given where a transaction changes one, received in every process of the service."""
