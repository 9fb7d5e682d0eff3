"""The configuration that `whet check` looks at: read without torch, so that a mistake in it is answered at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.build.run_dirs import placed
from whet.check.findings import Finding, fail, skip
from whet.config import ConfigError, load_config, read_tree
from whet.settings.rl import BaseRunConfig
from whet.settings.supervised import RUN_CONFIGS, command_of
from whet.types import JSON

CONFIGURATION = "configuration"
AREAS = (
    CONFIGURATION,
    *("batch", "algorithm", "control", "hooks", "device", "model", "attention", "tokenizer", "environment", "data", "evaluation", "reward"),
    *("limits", "length", "memory", "disk", "resume", "packages", "ports"),
)
"""Areas of the report, in their order."""
THE_REST = "all else"
"""Area of what cannot be looked at without a configuration."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check of a file."""

    command: str
    """Command that the file is for: train, sft ..."""
    findings: tuple[Finding, ...]
    memory: Mapping[str, int]
    """The memory plan in bytes, by part; empty where there is none."""

    @property
    def failed(self) -> int:
        return sum(finding.status == "FAIL" for finding in self.findings)

    def to_dict(self) -> dict[str, JSON]:
        findings = [finding.to_dict() for finding in self.findings]
        return {"command": self.command, "failed": self.failed, "findings": findings, "memory_bytes": dict(self.memory)}


def read_checked(path: Path, overrides: Sequence[str], command: str | None) -> tuple[str, BaseRunConfig] | CheckReport:
    """Read a configuration.

    Args:
        path: its TOML file.
        overrides: `key=value` settings on top.
        command: the command that the file is for; None: the one that its keys fit best.

    Returns:
        The command and the settings; if they cannot be read, the report.

    Raises:
        ValueError: there is no such command.
    """
    if command is not None and command not in RUN_CONFIGS:
        raise ValueError(f"--for={command} names no command that trains; choose {', '.join(RUN_CONFIGS)}")
    try:
        command = command or command_of(read_tree(path, overrides))
        config, _ = placed(load_config(RUN_CONFIGS[command], path, overrides), path)
    except ConfigError as error:
        wrong = [fail(problem).of(CONFIGURATION) for problem in error.located]
        return CheckReport("", (*wrong, skip("not checked: everything else needs the configuration").of(THE_REST)), {})
    return command, config
