"""The base of every configuration model: frozen, typed, and strict about unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen set of settings. A key it does not have is an error. The string below a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
