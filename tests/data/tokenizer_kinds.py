"""Small tokenizers of every kind in use, each with a chat template of its family."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.chat_templates import LLAMA2

PHI3 = """\
{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>\\n' + message.content + '<|end|>\\n' }}\
{% elif message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""As Phi-3's: it has no place for a tool's answer."""
MISTRAL = """\
{{- bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}\
{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""
"""As Mistral's later ones, whose `[INST]` are tokens."""
_TEXTS = ["the answer is 12", "how many turns are in this one", "user and assistant", "hello there, hello world"] * 8
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]")


def _legacy() -> Tokenizer:
    """SentencePiece BPE as Llama 2 was first converted: the space is put before every stretch of text between special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _decoder()
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    tokenizer.decoder = _decoder()
    return tokenizer


def _decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    return tokenizer


def _byte_level(*, prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    return tokenizer


MAKERS = {
    "legacy": _legacy,
    "always": lambda: _metaspace("always"),
    "first": lambda: _metaspace("first"),
    "unigram": _unigram,
    "bytes": lambda: _byte_level(prefix=False),
    "bytes_prefix": lambda: _byte_level(prefix=True),
    "wordpiece": _wordpiece,
}
PREFIXED = ("legacy", "always", "first", "unigram", "bytes_prefix")
TEMPLATES = {"llama2": LLAMA2, "phi3": PHI3, "mistral": MISTRAL}
_ENDS = {"llama2": "</s>", "phi3": "<|end|>", "mistral": "</s>"}


@cache
def tokenizer_like(kind: str, family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, with the template of a family."""
    tokenizer = MAKERS[kind]()
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet()
        if kind.startswith("bytes")
        else sorted(set("".join(_TEXTS) + "<>|/[]▁.?" + "abcdefgh0123456789"))
    )
    own = [token for token in SPECIAL if family != "llama2" or token in ("<unk>", "<s>", "</s>")]
    options = {"vocab_size": 400, "special_tokens": own, "initial_alphabet": alphabet, "show_progress": False}
    trainer = {"unigram": trainers.UnigramTrainer, "wordpiece": trainers.WordPieceTrainer}.get(kind, trainers.BpeTrainer)
    tokenizer.train_from_iterator(_TEXTS, trainer(**options, **({"unk_token": "<unk>"} if kind == "unigram" else {})))
    if family == "phi3":
        swallow = [AddedToken(text, rstrip=True, normalized=False, special=True) for text in ("<|user|>", "<|assistant|>", "<|end|>")]
        tokenizer.add_special_tokens(swallow)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token=_ENDS[family], clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATES[family]
    return fast
