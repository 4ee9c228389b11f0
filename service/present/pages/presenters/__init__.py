"""From the other rooms' services to what the pages show. No query is here: values come from service functions."""

from __future__ import annotations
