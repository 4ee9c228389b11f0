"""Ingestion: the upload of a step's shards, up to the commit point."""
