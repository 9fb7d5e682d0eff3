"""`whet rm` from settings to a folder that transformers reads: it learns a preference, resumes exactly, can be checked and replayed."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.e2e.tiny_pairs import BAD, GOOD, make_pairs, pair_settings
from tests.e2e.tiny_run import QUESTIONS, make_files, metrics_of, run_config, weights_of
from whet.check.check import check
from whet.config import dump_toml
from whet.core.nonfinite import NonFinite
from whet.data.template import Renderer, load_tokenizer
from whet.observe.records import read_records
from whet.runs.commands import train
from whet.runs.replay import replay_batch
from whet.runs.supervised import train_on_data
from whet.settings.supervised import RewardModelRunConfig
from whet.train.torch_native.backend import TorchBackend
from whet.types import Message


def config_of(folder, name, **changes):
    return RewardModelRunConfig.model_validate(pair_settings(folder, name, rm={}, **changes))


def conversation(folder, reply):
    """The tokens of the held-out question and a reply to it."""
    tokens, _ = Renderer(load_tokenizer(folder)).supervised((Message("user", QUESTIONS[3]), Message("assistant", reply)))
    return tokens


def score(folder, reply):
    """transformers' own score of a reply to the held-out question."""
    tokens = conversation(folder, reply)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits)


@pytest.mark.parametrize("flipped", [False, True])
def test_it_scores_the_preferred_reply_higher_and_transformers_agrees(tmp_path, flipped, capsys):
    make_pairs(tmp_path, flipped=flipped)
    values = train_on_data(config_of(tmp_path, "run", observe={"display": "plain"}))
    _, _, after = capsys.readouterr().out.partition("next:\n")
    assert after == f"  whet train CONFIG.toml reward.name=model reward.options.path={tmp_path}/run/model\n", "it writes no replies"
    assert values["eval/rm/accuracy"] == (0.0 if flipped else 1.0)
    good, bad = (score(tmp_path / "run/model", reply) for reply in (GOOD, BAD))
    assert (good > bad) != flipped
    assert values["eval/rm/margin"] == pytest.approx(good - bad, abs=1e-4)
    assert values["eval/rm/chosen_score"] == pytest.approx(good, abs=1e-4)


def test_a_second_start_gives_the_bits_of_one_long_run_and_a_reward_model_goes_on(tmp_path):
    make_pairs(tmp_path)
    train_on_data(config_of(tmp_path, "whole"))
    train_on_data(config_of(tmp_path, "parts", num_steps=5))
    train_on_data(config_of(tmp_path, "parts"))
    assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "parts")
    last = metrics_of(tmp_path / "whole")[-1]["eval/rm/margin"]
    train_on_data(config_of(tmp_path, "more", model={"path": str(tmp_path / "whole/model"), "device": "cpu"}, num_steps=1))
    assert metrics_of(tmp_path / "more")[0]["eval/rm/margin"] == pytest.approx(last, abs=1e-5)


def set_padding(folder, token):
    """What the model's config has as its padding token."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": token}))


def test_transformers_scores_a_padded_batch_as_single_conversations_where_the_base_model_names_no_padding(tmp_path):
    make_pairs(tmp_path)
    set_padding(tmp_path / "model", None)
    train_on_data(config_of(tmp_path, "run", num_steps=2))
    replies = (GOOD, BAD, "Half of 90 is 45, so 45 it is.")
    rows = [torch.tensor(conversation(tmp_path / "run/model", reply)) for reply in replies]
    assert len({len(row) for row in rows}) > 1, "something is padded"
    pad = load_tokenizer(tmp_path / "run/model").pad_token_id
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").eval()
    with torch.no_grad():
        found = model(input_ids=padded, attention_mask=(padded != pad).long()).logits[:, 0].tolist()
    assert found == pytest.approx([score(tmp_path / "run/model", reply) for reply in replies], abs=1e-5)


def test_where_turns_end_with_the_padding_token_none_is_written_and_the_last_token_is_scored(tmp_path):
    make_pairs(tmp_path)
    stop = load_tokenizer(tmp_path / "model").eos_token_id
    set_padding(tmp_path / "model", stop)
    values = train_on_data(config_of(tmp_path, "run"))
    assert conversation(tmp_path / "run/model", GOOD)[-1] == stop
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert model.config.pad_token_id is None
    for reply, name in ((GOOD, "chosen"), (BAD, "rejected")):
        assert score(tmp_path / "run/model", reply) == pytest.approx(values[f"eval/rm/{name}_score"], abs=1e-4)


def test_an_adapter_and_a_new_head_learn_it_too(tmp_path):
    make_pairs(tmp_path)
    train = {"optim": {"lr": 3e-2}, "lora": {"rank": 4, "export_merged": True}}
    values = train_on_data(config_of(tmp_path, "run", train=train))
    assert values["eval/rm/accuracy"] == 1.0
    assert score(tmp_path / "run/merged", GOOD) - score(tmp_path / "run/merged", BAD) == pytest.approx(values["eval/rm/margin"], abs=1e-4)


def test_a_policy_is_trained_on_its_scores_of_the_very_tokens(tmp_path):
    make_pairs(tmp_path)
    train_on_data(config_of(tmp_path, "rm", num_steps=20))
    make_files(tmp_path / "rl")
    shutil.rmtree(tmp_path / "rl/model")  # the policy has the reward model's tokenizer
    reward = {"name": "model", "options": {"path": str(tmp_path / "rm/model"), "device": "cpu"}}
    for name in ("one", "two"):
        config = run_config(tmp_path / "rl", name, num_rollouts=2, algo={"name": "ppo"}, reward=reward,
                            model={"path": str(tmp_path / "model")}, critic={"path": str(tmp_path / "rm/model")})  # fmt: skip
        train(config)
    assert weights_of(tmp_path / "rl/one") == weights_of(tmp_path / "rl/two")
    rows = read_records(tmp_path / "rl/one/rollouts")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm/model").eval()
    with torch.no_grad():
        expected = [float(model(input_ids=torch.tensor([row["tokens"]])).logits) for row in rows]
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected}) > 3


def test_check_plans_for_a_score_head_and_replay_does_a_step_again(tmp_path, monkeypatch):
    make_pairs(tmp_path)
    config = config_of(tmp_path, "run")
    (tmp_path / "rm.toml").write_text(dump_toml(config))
    found = check(tmp_path / "rm.toml", [], lambda finding: None)
    assert (found.command, found.failed) == ("rm", 0), [f for f in found.findings if f.status == "FAIL"]
    assert "logits" not in found.memory and "reference model" not in found.memory and found.memory["gradients"] > 0
    step = TorchBackend.optim_step

    def spoil(backend):
        for parameter in backend.model.hf.parameters():
            parameter.grad.fill_(torch.nan)
        return step(backend)

    monkeypatch.setattr(TorchBackend, "optim_step", spoil)
    with pytest.raises(NonFinite, match="whet replay-batch"):
        train_on_data(config)
    monkeypatch.undo()
    again = replay_batch(tmp_path / "run/nonfinite/batch_1")
    assert again.message is None and again.loss is not None
