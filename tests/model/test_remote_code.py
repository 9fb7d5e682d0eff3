"""Python code of a model's folder is not run unless the settings ask for it."""

import json
import shutil

import pytest

from whet.data.template import load_tokenizer
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.quickstart.model import SmallModelConfig, make_model

SHAPE = SmallModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    make_model(folder, ["How many pens are 3 and 4?"] * 2, SHAPE, 0)
    return folder


@pytest.fixture
def hostile(plain, tmp_path):
    """A folder whose config, model and tokenizer name code that leaves a mark."""
    folder, mark = tmp_path / "hostile", tmp_path / "mark"
    shutil.copytree(plain, folder)
    (folder / "own_code.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for name, table in {
        "config.json": {
            "model_type": "unheard_of",
            "auto_map": {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"},
        },
        "tokenizer_config.json": {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_code.T", "own_code.T"]}},
    }.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **table}))
    return folder, mark


def test_a_model_with_code_of_its_own_is_refused_and_the_code_does_not_run(hostile):
    folder, mark = hostile
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=False)
    assert not mark.exists()


def test_a_tokenizer_with_code_of_its_own_runs_none_of_it(hostile):
    folder, mark = hostile
    try:
        load_tokenizer(folder, trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    assert not mark.exists()
