"""One trajectory as one HTML file that opens anywhere, without a server or a network."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from pathlib import Path

PAGE = Path(__file__).parent / "page"
ENTRY = "exported.js"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.-]+\.js)";\n', re.MULTILINE)
MOST_CREDIT_BYTES = 200_000
"""Compressed size up to which the columns of the whole rollout's credit go along, so that whitening is computed again in the file."""


def export_page(trajectory: bytes, credit: bytes, language: str) -> str:
    """The file: the page's own scripts and style, and the packs as compressed data.

    Args:
        trajectory: pack of the trajectory.
        credit: pack of its rollout's credit; left out where it is large.
        language: en or zh.
    """
    script, style = bundle(), (PAGE / "style.css").read_text(encoding="utf-8")
    small = zlib.compress(credit, 9)
    parts = {
        "language": "zh-CN" if language == "zh" else "en",
        "script": script,
        "script digest": digest(script),
        "style": style,
        "style digest": digest(style),
        "trajectory": base64.b64encode(zlib.compress(trajectory, 9)).decode(),
        "credit": base64.b64encode(small).decode() if len(small) <= MOST_CREDIT_BYTES else "",
    }
    return re.sub("@([a-z ]+)@", lambda found: parts[found[1]], (PAGE / "exported.html").read_text(encoding="utf-8"))


def bundle() -> str:
    """The modules that the exported page needs as one: each behind those that it imports, without imports and exports.

    Every name at the top of a module is there once in all of them, so that nothing is hidden.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in IMPORT.findall((PAGE / name).read_text(encoding="utf-8")):
                visit(needed)
            order.append(name)

    visit(ENTRY)
    texts = [IMPORT.sub("", (PAGE / name).read_text(encoding="utf-8")) for name in order]
    return "\n".join(re.sub(r"^export (?=(?:async )?(?:function|const|class)\b)", "", text, flags=re.MULTILINE) for text in texts)


def digest(text: str) -> str:
    """A source expression of a Content-Security-Policy that allows this text alone."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def file_name_of(trajectory: str, rollout: int) -> str:
    """Name of the file of a trajectory."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", trajectory).strip("-")[:80]
    return f"whet-{rollout}-{plain or 'trajectory'}.html"
