"""What is seen while a model is written."""

from transformers.utils import logging

from whet.quickstart.model import SmallModelConfig, make_model

SHAPE = SmallModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)


def test_a_model_is_written_without_a_progress_bar(tmp_path, capsys):
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        make_model(tmp_path / "model", ["some text"], SHAPE, seed=0)
        assert logging.is_progress_bar_enabled(), "the caller's own bars stay"
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    assert (tmp_path / "model/model.safetensors").is_file()
    assert capsys.readouterr().err == ""
