"""Errors of model folders."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from tests.errors.error_bench import Bench, Case, Told, together


def no_folder(bench: Bench) -> Told:
    return bench.refused("model.path=models")


def no_network(bench: Bench) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(bench.folder / "cache"))
        return bench.refused("model.path=owner/name")


def no_config(bench: Bench) -> Told:
    folder = bench.model("mine")
    (folder / "config.json").unlink()
    return bench.refused("model.path=mine")


def no_weights(bench: Bench) -> Told:
    folder = bench.model("mine")
    (folder / "model.safetensors").unlink()
    return bench.refused("model.path=mine")


def cut_short(bench: Bench) -> Told:
    weights = bench.model("mine") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return bench.refused("model.path=mine")


def other_shapes(bench: Bench) -> Told:
    path = bench.model("mine") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 32}))
    return bench.refused("model.path=mine")


def unknown_kind(bench: Bench) -> Told:
    path = bench.model("mine") / "config.json"
    path.write_text(json.dumps({"hidden_size": 16}))
    return bench.refused("model.path=mine")


def no_tokenizer(bench: Bench) -> Told:
    folder = bench.model("mine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return bench.refused("model.path=mine")


def damaged_tokenizer(bench: Bench) -> Told:
    (bench.model("mine") / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    return bench.refused("model.path=mine")


def other_tokenizer(bench: Bench) -> Told:
    folder = bench.model("mine")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    sft = 'run_dir = "runs/sft"\nnum_steps = 1\n[model]\npath = "mine"\n[data]\npath = "train.jsonl"\n'
    return together(bench.refused("model.path=mine"), bench.refused(command="sft", config=bench.file("sft.toml", sft)))


def no_template(bench: Bench) -> Told:
    (bench.model("mine") / "chat_template.jinja").unlink()
    return bench.refused("model.path=mine")


def template_refuses(bench: Bench) -> Told:
    """In training prompts, and in those of an evaluation that would come later."""
    template = bench.model("mine") / "chat_template.jinja"
    template.write_text("{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + template.read_text())
    told = bench.refused("model.path=mine", 'data.system_prompt="Be brief."')
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
    bench.file("test.jsonl", json.dumps({"prompt": messages, "label": "5"}) + "\n")
    return together(told, bench.refused("model.path=mine", "evaluate.sets.test.path=test.jsonl", "num_rollouts=2"))


def no_device(bench: Bench) -> Told:
    return bench.refused("model.device=gpu")


MODEL = (
    Case(
        id="no-model",
        title="There is no such model",
        cause="`model.path` is neither a folder nor a name on the Hugging Face hub.",
        remedy="Correct it. Relative paths start in the current folder; hub names read `owner/name`.",
        words=("model.path: there is no model folder 'models'", "owner/name"),
        provoke=no_folder,
        seen_by_check=True,
    ),
    Case(
        id="no-network",
        title="A model of the hub that is not here, and no network",
        cause="`owner/name` is taken from the Hugging Face cache, else downloaded; here it is in no cache and downloading is switched off.",
        remedy="Run the `hf download` that the message shows where there is a network, or unset `HF_HUB_OFFLINE`.",
        words=("the model 'owner/name' is neither a local path nor in the Hugging Face cache (.../cache)", "`hf download owner/name`"),
        provoke=no_network,
        seen_by_check=True,
    ),
    Case(
        id="no-config",
        title="A model folder without config.json",
        cause="The folder is not a model in Hugging Face format, or not all of it was copied.",
        remedy="Give the folder that holds `config.json`, `model.safetensors` and the tokenizer.",
        words=("model.path: mine has no config.json",),
        provoke=no_config,
        seen_by_check=True,
    ),
    Case(
        id="unknown-model",
        title="A model that transformers does not know",
        cause="`config.json` does not say which architecture the model has, or names one that the installed transformers lacks.",
        remedy="Copy the model's own config.json, or install a newer transformers. A model that brings its own code needs "
        "`model.trust_remote_code=true`.",
        words=("mine/config.json cannot be used", "model_type"),
        provoke=unknown_kind,
        seen_by_check=True,
    ),
    Case(
        id="no-weights",
        title="A model folder without weights",
        cause="Only the small files were copied, or a download broke off.",
        remedy="Copy or download the whole folder.",
        words=("mine has no weights (model.safetensors)",),
        provoke=no_weights,
        seen_by_check=True,
    ),
    Case(
        id="weights-cut-short",
        title="Weights that are cut short",
        cause="A copy or download broke off, or the file is a git-lfs pointer in place of the weights.",
        remedy="Copy or download the file again (`git lfs pull` for a pointer).",
        words=("mine/model.safetensors", "cut short or damaged", "again"),
        provoke=cut_short,
        seen_by_check=True,
    ),
    Case(
        id="weights-of-another-shape",
        title="Weights that do not fit config.json",
        cause="`config.json` and the weights are of different models.",
        remedy="Copy both from the same model.",
        words=("have 3 tensors of other shapes", "model.layers.0.mlp.down_proj.weight: (16, 24), not (16, 32)"),
        provoke=other_shapes,
        seen_by_check=True,
        check_words=("3 tensors in mine do not fit config.json", "model.layers.0.mlp.down_proj.weight: (16, 24), not (16, 32)"),
    ),
    Case(
        id="no-tokenizer",
        title="A model folder without a tokenizer",
        cause="The weights were saved without their tokenizer.",
        remedy="Copy `tokenizer.json` and `tokenizer_config.json` (and `chat_template.jinja`) from the model that it was made from.",
        words=("model.path: mine has no tokenizer.json",),
        provoke=no_tokenizer,
        seen_by_check=True,
    ),
    Case(
        id="damaged-tokenizer",
        title="A tokenizer that cannot be read",
        cause="`tokenizer.json` or `tokenizer_config.json` is cut short, damaged or of another kind.",
        remedy="Copy the model's own files.",
        words=("the tokenizer of mine cannot be loaded", "copy the model's own"),
        provoke=damaged_tokenizer,
        seen_by_check=True,
    ),
    Case(
        id="other-tokenizer",
        title="A tokenizer with tokens that the model does not have",
        cause="The tokenizer is another model's, or tokens were added to it without giving the model a row for each. (A model may have "
        "more ids than its tokenizer: sizes are often rounded up.)",
        remedy="Copy the model's own tokenizer files. If tokens were added on purpose, resize the model's embeddings "
        "(`resize_token_embeddings` in transformers) and save it.",
        words=("has 2 tokens that its model does not have", "'<think>'", "vocab_size"),
        provoke=other_tokenizer,
        seen_by_check=True,
    ),
    Case(
        id="no-chat-template",
        title="Chat prompts, and a tokenizer without a chat template",
        cause="Prompts become messages, and messages need the model's chat template. Base models often have none.",
        remedy="Copy a `chat_template.jinja` into the folder, or set `data.chat=false` to use prompts as the text that they are.",
        words=("train.jsonl:1", "the tokenizer has no chat template", "data.chat=false"),
        provoke=no_template,
        seen_by_check=True,
    ),
    Case(
        id="template-refuses",
        title="A chat template that cannot render the prompts",
        cause="The template is broken, or refuses the roles of the messages: some know no system message, some want user and assistant "
        "in turn. The first prompt of the training data and of each evaluation set is rendered before anything is trained.",
        remedy="Change the messages (or `data.system_prompt`), or the template.",
        words=("train.jsonl:1", "test.jsonl:1", "cannot render the roles ['system', 'user']: no system role"),
        provoke=template_refuses,
        seen_by_check=True,
    ),
    Case(
        id="no-device",
        title="A device that is not there",
        cause="`model.device` names what torch does not know or does not see.",
        remedy="Leave it out (`auto` takes what there is), or use `cuda`, `mps` or `cpu`.",
        words=("model.device is 'gpu'", "use auto, cuda, mps or cpu"),
        provoke=no_device,
        seen_by_check=True,
    ),
)
