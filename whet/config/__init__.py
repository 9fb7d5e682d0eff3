"""Typed configuration: models, TOML files with overrides, import references."""

from whet.config.base import Config
from whet.config.code import changed_code, code_digests
from whet.config.describe import KeyDoc, describe
from whet.config.dump import config_hash, dump_toml
from whet.config.effect import changed_settings, refuse_unread
from whet.config.errors import ConfigError
from whet.config.hook import Hook, HookFailed, place_in
from whet.config.load import load_config, read_tree, validated
from whet.config.reference import Reference, call_factory, resolve, resolve_callable

__all__ = [
    "Config",
    "ConfigError",
    "Hook",
    "HookFailed",
    "KeyDoc",
    "Reference",
    "call_factory",
    "changed_code",
    "changed_settings",
    "code_digests",
    "config_hash",
    "describe",
    "dump_toml",
    "load_config",
    "place_in",
    "read_tree",
    "refuse_unread",
    "resolve",
    "resolve_callable",
    "validated",
]
