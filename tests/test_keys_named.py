"""What whet's errors, advice and help name as settings are settings that there are."""

import ast
import re
from pathlib import Path

import pytest

from whet.config import Config, describe
from whet.evaluate.config import ScoreConfig
from whet.plan.rollouts.config import SimulationConfig
from whet.quickstart.run import QuickstartConfig
from whet.serve.settings import ServeConfig
from whet.settings.supervised import RUN_CONFIGS

ROOT = Path(__file__).resolve().parents[1] / "whet"
KEYS = [key for tree in (*RUN_CONFIGS.values(), ServeConfig, ScoreConfig, SimulationConfig, QuickstartConfig) for key in describe(tree)]


def options_of(model):
    """Settings below `options` of rewards and filters, which the trees leave open."""
    for each in model.__subclasses__():
        if each.__name__.endswith("Options"):
            yield from (("options", key) for key in each.model_fields)
        yield from options_of(each)


PATHS = {tuple(key.path.replace("[]", "").split(".")) for key in KEYS} | set(options_of(Config))
OPEN = {"options", "template_kwargs", "config"}
"""Below these, a user's code, a chat template and a model's config.json have keys of their own."""
TABLES = {path[0] for path in PATHS if len(path) > 1} - OPEN
NO_SETTINGS = {
    *("env.resources", "env.start", "env.step", "env.close"),  # where a trajectory failed
    *("model.safetensors", "model.safetensors.index.json", "batch.safetensors", "tie_word_embeddings", "attention_dropout"),  # a model's
    *("k", "n", "c", "x", "pid", "ppid", "state", "lstart", "loss_mask"),
    *("value", "max"),  # HTML's
    *("version", "charset"),  # a content type's
    *("critic.model.override_config",),  # verl's
    *("function", "parameter", "string", "to"),  # written in tool calls
    *("core", "size", "nr_inodes", "uid", "gid", "subset", "status"),  # options of ulimit and mount; a shell's variable
    *("a.b.c", "tool_choice", "rm.toml"),  # stands for any key; a client's; a file of whet init
}
GAP = "\x00"
"""What an f-string fills in."""
KEY = rf"[a-z{GAP}][a-z0-9_{GAP}]*"
DOTTED = re.compile(rf"(?<![\w./{GAP}-])(?:{'|'.join(sorted(TABLES))})(?:\.{KEY})+(?![\w(/])")
ASSIGNED = re.compile(rf"(?<![\w./{GAP}{{?&-])({KEY}(?:\.{KEY})*)=(?![=>])")
ADVISED = re.compile(rf"\b(?:set|raise|lower|unset|leave out|drop) (?=[a-z]+[_.][a-z])({KEY}(?:\.{KEY})*)(?= |[,;:)]|$)")
TABLE = re.compile(rf"(?<![\w\]{GAP}])\[([a-z_]+(?:\.{KEY})*)\]")


def texts_of(path):
    """The strings of a file that are no documentation, with gaps, and no patterns."""
    tree = ast.parse(path.read_text())
    skip = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(each.value) if isinstance(each, ast.Constant) else GAP for each in node.values]
            skip |= {id(each) for each in node.values}
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            text = node.value
        else:
            continue
        if "\\" not in text:
            yield text


def named_in(text):
    for pattern in (DOTTED, ASSIGNED, ADVISED, TABLE):
        if " " in text or pattern is not TABLE:
            yield from (found[1] if found.groups() else found[0] for found in pattern.finditer(text))


def is_setting(key):
    """Whether a tree has the key, or one whose end it is: errors of a table leave out where that is."""
    parts = key.split(".")
    patterns = [re.escape(part).replace(re.escape(GAP), ".*") for part in parts]

    def fits(path):
        end = path[-len(parts) :]
        return len(end) == len(parts) and all(
            (each == "<name>" and i > 0) or re.fullmatch(pattern, each) for i, (pattern, each) in enumerate(zip(patterns, end, strict=True))
        )

    return any(map(fits, PATHS)) or any(part in OPEN for part in parts[:-1])


def unknown(texts):
    named = {key for text in texts for key in named_in(text) if key.strip(GAP + ".")}
    return {key.replace(GAP, "{}") for key in named - NO_SETTINGS if not is_setting(key)}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_messages_name_exist(path):
    assert unknown(texts_of(path)) == set()


def test_settings_that_help_names_exist():
    assert unknown(key.doc for key in KEYS) == set()


def test_exceptions_are_needed():
    named = {key for path in ROOT.rglob("*.py") for text in texts_of(path) for key in named_in(text)}
    assert {key for key in NO_SETTINGS if key not in named or is_setting(key)} == set()


@pytest.mark.parametrize("text", ["set train.lr=3", "set momentumm=0", "raise train.max_token", "[algoo] has no effect", "set max_ages"])
def test_a_setting_that_is_not_there_is_found(text):
    assert len(unknown([text])) == 1
