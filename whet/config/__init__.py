"""Typed configuration: models, TOML files with overrides, import references."""

from whet.config.base import Config
from whet.config.describe import KeyDoc, describe
from whet.config.dump import config_hash, dump_toml
from whet.config.errors import ConfigError
from whet.config.load import load_config
from whet.config.reference import Reference, call_factory, resolve, resolve_callable

__all__ = [
    "Config",
    "ConfigError",
    "KeyDoc",
    "Reference",
    "call_factory",
    "config_hash",
    "describe",
    "dump_toml",
    "load_config",
    "resolve",
    "resolve_callable",
]
