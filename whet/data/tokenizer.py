"""The tokenizer of a model folder, and what the folder says of the ends of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from whet.data.hub import TOKENIZER, check_model_folder
from whet.model.causal import read_config


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder.

    Raises:
        ValueError: if there is none, or it cannot be read, or it has tokens that the folder's model does not have.
    """
    check_model_folder(str(folder), (TOKENIZER,))
    vocab_size = _vocab_size(folder, trust_remote_code)
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise bare Exceptions, too
        what = f"{type(error).__name__}: {error}; copy the model's own tokenizer files there"
        raise ValueError(f"model.path: the tokenizer of {folder} cannot be loaded: {what}") from error
    tokenizer = cast(PreTrainedTokenizerFast, loaded)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size, folder)
    return tokenizer


def _vocab_size(folder: Path, trust_remote_code: bool) -> int | None:
    """Vocabulary size of the model in the folder; None if it holds no language model, an error that
    loading it reports."""
    if not (folder / "config.json").is_file():
        return None
    text = read_config(folder, trust_remote_code=trust_remote_code).get_text_config()
    return text.vocab_size if hasattr(text, "vocab_size") else None


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, folder: Path) -> None:
    """See that the model has every token that text can become. It may have more: many models' sizes are rounded up.

    Padding and the placeholders of images and sounds may lie beyond: no text of whet's becomes one.

    Raises:
        ValueError: naming tokens that the model does not have.
    """
    written = ("bos_token", "eos_token", "unk_token")
    unused = {str(text) for name, text in tokenizer.special_tokens_map.items() if name not in written}
    beyond = {text: i for text, i in tokenizer.get_vocab().items() if i >= vocab_size and text not in unused}
    if beyond:
        some = ", ".join(f"{text!r} ({i})" for text, i in sorted(beyond.items(), key=lambda item: item[1])[:3])
        raise ValueError(
            f"model.path: the tokenizer of {folder} has {len(beyond)} tokens that its model does not have, among them {some}: "
            f"the model's vocab_size is {vocab_size}, so its ids end at {vocab_size - 1}. Copy the model's own tokenizer files "
            "there, or, where tokens were added on purpose, resize the model's embeddings to them"
        )


def turn_ends(folder: Path) -> tuple[int, ...]:
    """The ids at which the model's own generation settings end a turn; none, where it has no such settings.

    Raises:
        ValueError: the file cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        found = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; copy the model's own there") from None
    return tuple(token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int))
