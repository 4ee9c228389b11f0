"""Untrusted Parquet is decoded and measured in other processes, bounded in number, memory and time."""
