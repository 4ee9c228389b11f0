"""Ingestion: tokens per second, small steps per second, bytes of database, memory."""
