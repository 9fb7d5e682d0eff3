"""Real tokenizers with real chat templates, where they are packaged, and templates in the family's form where they are not."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.data.formats import templates

VARIABLE = "WHET_TEST_AGENTS"


def agents_folder() -> Path:
    """The folder that `make test-agents` fills."""
    if VARIABLE not in os.environ:
        pytest.fail(f"{VARIABLE} names a folder of environments and tokenizers: make test-agents makes it")
    return Path(os.environ[VARIABLE])


@dataclass(frozen=True)
class RealFamily:
    """A family of models as its makers have it."""

    tokenizer: str
    template: str
    """File of TRL's without its ending, or `own:NAME` of `templates.FAMILIES`."""
    format: str
    form: str
    """Form of the calls, of `writing.WRITERS`."""
    eos: str
    renames: tuple[tuple[int, str], ...] = ()
    """Reserved tokens, by id, and what the model has in their place."""
    added: tuple[str, ...] = ()
    """Tokens that the family has and this tokenizer does not."""
    oracle: str = ""
    """Class of the package renderers."""
    max_calls: int = 3
    thinks: bool = True


_GLM = (*templates._GLM_TOKENS, *templates._ARGS)
_KIMI = templates.FAMILIES["kimi"]
REAL = {
    "qwen2.5": RealFamily("qwen2_5", "qwen2_5", "hermes", "hermes", "<|im_end|>", thinks=False),
    "qwen3": RealFamily("qwen3", "qwen3", "hermes", "hermes", "<|im_end|>", oracle="Qwen3Renderer"),
    "qwen3-2507": RealFamily("qwen3", "qwen3_instruct_2507", "hermes", "hermes", "<|im_end|>", thinks=False),
    "qwen3.5": RealFamily("qwen3", "qwen3_5_think", "qwen_xml", "qwen_xml", "<|im_end|>", oracle="Qwen35Renderer"),
    "qwen3.8": RealFamily("qwen3", "qwen3_8", "qwen_xml", "qwen_xml", "<|im_end|>"),
    "nemotron3": RealFamily("qwen3", "nemotron_3_nano", "qwen_xml", "qwen_xml", "<|im_end|>"),
    "llama3.1": RealFamily(
        "llama3_1", "llama3_1", "llama3", "llama3", "<|eot_id|>", ((128008, "<|eom_id|>"), (128010, "<|python_tag|>")),
        oracle="Llama3Renderer", max_calls=1, thinks=False,
    ),
    "llama3.2": RealFamily(
        "llama3_1", "llama3_2", "llama3", "llama3", "<|eot_id|>", ((128008, "<|eom_id|>"), (128010, "<|python_tag|>")),
        max_calls=1, thinks=False,
    ),
    "deepseek-v3": RealFamily(
        "deepseek_v3", "deepseekv3", "deepseek_v3", "deepseek_v3", "<｜end▁of▁sentence｜>", oracle="DeepSeekV3Renderer", thinks=False
    ),
    "deepseek-v3.1": RealFamily("deepseek_v4", "own:deepseek_v31", "deepseek_v31", "deepseek_v31", "<｜end▁of▁sentence｜>", thinks=False),
    "deepseek-v4": RealFamily("deepseek_v4", "own:deepseek_v4", "dsml", "dsml", "<｜end▁of▁sentence｜>", oracle="DeepSeekV4Renderer"),
    "glm4.5": RealFamily("qwen3", "glm4moe", "glm", "glm", "<|endoftext|>", added=_GLM, oracle="GLM45Renderer"),
    "glm5": RealFamily("qwen3", "own:glm5", "glm", "glm5", "<|endoftext|>", added=_GLM, oracle="GLM5Renderer"),
    "kimi-k2": RealFamily(
        "qwen3", "own:kimi", "kimi", "kimi", "<|im_end|>", added=(*_KIMI.special[1:], *_KIMI.added), oracle="KimiK2Renderer", thinks=False
    ),
    "gpt-oss": RealFamily("gptoss", "gptoss", "harmony", "harmony", "<|return|>", max_calls=1),
}  # fmt: skip


@cache
def model_folder(name: str) -> Path:
    """A folder with the family's tokenizer and chat template."""
    family, root = REAL[name], agents_folder()
    folder = root / "models" / name
    source = root / "tokenizers" / family.tokenizer
    text = (source / "tokenizer.json").read_text(encoding="utf-8")
    tree = json.loads(text)
    for token in tree["added_tokens"]:
        token["content"] = dict(family.renames).get(token["id"], token["content"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    given = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    bos = given.get("bos_token")
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=family.eos,
        bos_token=bos["content"] if isinstance(bos, dict) else bos,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in family.added if text not in made.get_vocab()])
    own = family.template.removeprefix("own:")
    made.chat_template = (
        templates.FAMILIES[own].template if own != family.template else (root / "templates" / f"{own}.jinja").read_text(encoding="utf-8")
    )
    made.save_pretrained(folder)
    return folder


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer, with its template."""
    return PreTrainedTokenizerFast.from_pretrained(model_folder(name))
