"""Schemas of rules."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from foreshock.diagnosis.rule_files import LARGEST_TEXT


class RulesPut(BaseModel):
    """A file of rules."""

    model_config = ConfigDict(extra="forbid")

    toml: str = Field(max_length=LARGEST_TEXT, description="changes of the default rules; see docs/early-warning.md")
