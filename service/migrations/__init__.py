"""Alembic migrations, inside the package so that the wheel carries them; `service.database.schema` runs them."""
