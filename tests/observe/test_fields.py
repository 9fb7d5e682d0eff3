"""JSON of a run's folder that is not of the form that whet writes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from whet.build_trained import newest_weights
from whet.observe.files import read_fields
from whet.train.kept import BATCH, CONFIG, MODEL, REASON, read_kept


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ("\xff", "is no JSON object"),
        ("{}", "has nothing as 'name', expected str"),
        ('{"name": 3}', "has int as 'name', expected str"),
        ('{"name": "a", "steps": true}', "has bool as 'steps', expected int"),
        ('{"name": "a", "steps": 1, "scale": "1"}', "has str as 'scale', expected int or float"),
        ('{"name": "a", "steps": 1, "scale": true}', "has bool as 'scale', expected int or float"),
    ],
)
def test_what_is_odd_is_told_by_file_and_field(tmp_path, text, told):
    path = tmp_path / "odd.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"odd\\.json {told}: it is damaged, or not whet's"):
        read_fields(path, {"name": str, "steps": int, "scale": (int, float)})


def test_fields_of_their_types_are_given_back_with_others(tmp_path):
    path, value = tmp_path / "whole.json", {"name": "a", "steps": 1, "scale": 2, "more": None}
    path.write_text(json.dumps(value))
    assert read_fields(path, {"name": str, "steps": int, "scale": (int, float)}) == value


@pytest.mark.parametrize("text", ["", "[]", '"finished"', "{"])
def test_a_run_whose_end_cannot_be_read_has_not_come_to_it(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "end.json").write_text(text)
    assert newest_weights(tmp_path) == tmp_path / "model"


def test_a_kept_batch_with_an_odd_reason_is_told(tmp_path):
    for name in (CONFIG, MODEL):
        (tmp_path / name).write_text("")
    save_file({"tokens": torch.zeros(1)}, tmp_path / BATCH)
    (tmp_path / REASON).write_text('{"message": "NaN"}')
    with pytest.raises(ValueError, match=r"reason\.json has nothing as 'learner', expected str"):
        read_kept(tmp_path)
