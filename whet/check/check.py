"""`whet check`: everything that a run needs, examined without training. Every check is a function in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.build.process import quiet_transformers
from whet.build.programs import program_of
from whet.check.budget import check_limits, check_memory
from whet.check.context import CheckContext
from whet.check.data import check_data, check_evaluation
from whet.check.disk import check_disk
from whet.check.findings import Finding, Missing, Note, fail, ok, skip
from whet.check.model import check_attention, check_device, check_model, check_tokenizer
from whet.check.play import check_environment
from whet.check.reading import CONFIGURATION, CheckReport, read_checked
from whet.check.resume import check_resume
from whet.check.rewards import check_rewards
from whet.check.settings import (
    check_algorithm,
    check_batch,
    check_control,
    check_hooks,
    check_length,
    check_packages,
    check_ports,
)
from whet.config import ConfigError
from whet.settings.rl import BaseRunConfig


@dataclass(frozen=True, slots=True)
class Check:
    """One area of the report."""

    area: str
    run: Callable[[CheckContext], Iterator[Note]]
    supervised: bool = True
    """True if supervised runs have it, too."""


CHECKS = (
    Check("batch", check_batch),
    Check("algorithm", check_algorithm, supervised=False),
    Check("control", check_control, supervised=False),
    Check("hooks", check_hooks, supervised=False),
    Check("device", check_device),
    Check("model", check_model),
    Check("attention", check_attention),
    Check("tokenizer", check_tokenizer),
    Check("environment", check_environment, supervised=False),
    Check("data", check_data),
    Check("evaluation", check_evaluation, supervised=False),
    Check("reward", check_rewards, supervised=False),
    Check("limits", check_limits, supervised=False),
    Check("length", check_length),
    Check("memory", check_memory),
    Check("disk", check_disk),
    Check("resume", check_resume),
    Check("packages", check_packages),
    Check("ports", check_ports),
)
"""Ordered, as the areas of `AREAS`: a check may use the results of those above it."""

def check(
    path: Path,
    overrides: Sequence[str],
    show: Callable[[Finding], None],
    command: str | None = None,
    *,
    calls_tools: bool = False,
) -> CheckReport:
    """Check a configuration.

    Args:
        path: its TOML file.
        overrides: `key=value` settings on top.
        show: called with each finding as it is made.
        command: the command that the file is for; None: the one that its keys fit best.
        calls_tools: true: call every tool, and let environments answer the replies that are scored.

    Raises:
        ValueError: there is no such command.
    """
    found = read_checked(path, overrides, command)
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        show(finding)

    if isinstance(found, CheckReport):
        for finding in found.findings:
            show(finding)
        return found
    quiet_transformers()
    command, config = found
    add(ok(f"{path} is a file for `whet {command}`").of(CONFIGURATION))
    context = CheckContext(config, calls_tools=calls_tools)
    for one in checks_of(config):
        for note in notes_of(one, context):
            add(note.of(one.area))
    memory = {} if context.memory is None else {part.name: part.size_bytes for part in context.memory.parts}
    return CheckReport(command, tuple(findings), memory)


def checks_of(config: BaseRunConfig) -> list[Check]:
    """The checks that a kind of run has, in their order."""
    return [one for one in CHECKS if one.supervised or program_of(config).unit == "rollout"]


def notes_of(one: Check, context: CheckContext) -> Iterator[Note]:
    """Notes of a check, up to the error that stopped it."""
    try:
        yield from one.run(context)
    except Missing as missing:
        yield skip(f"not checked: needs {missing}")
    except ConfigError as error:
        yield from map(fail, error.problems)
    except (ValueError, OSError) as error:
        yield fail(str(error))
