"""Runs that are written into a database by SQL: a service would take hours to receive so many steps."""

from __future__ import annotations
