"""The token store: Parquet files that the catalogue in the database points at."""
