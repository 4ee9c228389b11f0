"""Columnar answers: numpy columns straight from the database, down-sampled, and sent as JSON, CSV or Parquet."""
