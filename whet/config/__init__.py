"""Typed configuration: models, TOML files with overrides, import references."""

from whet.config.base import Config
from whet.config.code import changed_code, code_digests
from whet.config.describe import KeyDoc, describe, describe_table, overview
from whet.config.dump import config_hash, dump_toml
from whet.config.effect import refuse_unread
from whet.config.errors import ConfigError
from whet.config.hook import Hook, HookFailed
from whet.config.load import load_config, read_tree, validated
from whet.config.place import place_in, place_of
from whet.config.reference import Reference, call_factory, resolve, resolve_callable
from whet.config.union import Members, OneOf, chosen, members_of

__all__ = [
    "Config",
    "ConfigError",
    "Hook",
    "HookFailed",
    "KeyDoc",
    "Members",
    "OneOf",
    "Reference",
    "call_factory",
    "changed_code",
    "chosen",
    "code_digests",
    "config_hash",
    "describe",
    "describe_table",
    "dump_toml",
    "load_config",
    "members_of",
    "overview",
    "place_in",
    "place_of",
    "read_tree",
    "refuse_unread",
    "resolve",
    "resolve_callable",
    "validated",
]
