"""The database: engine and dialects, tables, sessions (read, write), migrations."""
