"""Adapters: the same policy at first, merged or read by peft the same one later, and a base that stays as it is."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3MoeConfig

from tests.train.tiny_policy import DEVICE, plain, policy, qwen3, rollout
from whet.algo.base import Need
from whet.algo.sft import sft_loss
from whet.core.weights import token_mean
from whet.model.attention import ATTENTION
from whet.model.causal import CausalModel, prepare, random_causal, settle
from whet.model.config import LoraConfig, ModelConfig
from whet.model.digest import digests_of
from whet.model.lora import FILE, add_adapter
from whet.model.scalar import ScalarModel
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import OptimConfig, TrainConfig

TOKENS = torch.tensor([[5, 9, 2, 44, 17, 3, 8]])


def backend_of(model, **lora):
    return TorchBackend(model, TrainConfig(lora=LoraConfig(rank=4, **lora), optim=OptimConfig(lr=3e-2)), total_steps=10)


def trained(model, steps=3, **lora):
    backend = backend_of(model, **lora)
    batch = rollout()
    batch = batch.with_(weights=token_mean(batch))
    for _ in range(steps):
        backend.forward_backward(batch, sft_loss)
        backend.optim_step()
    return backend


def logits(hf):
    with torch.no_grad():
        return hf(input_ids=TOKENS.to(hf.device), use_cache=False).logits.cpu()


def own(model):
    """Logits of whet's model through transformers' own attention."""
    model.hf.set_attn_implementation("eager")
    found = logits(model.hf)
    model.hf.set_attn_implementation(ATTENTION)
    return found


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_a_new_adapter_changes_no_bit_of_what_the_policy_says(init):
    model = policy()
    before = own(model)
    add_adapter(model, LoraConfig(init=init))
    assert torch.equal(own(model), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_changes_the_adapter_alone_and_off_it_is_the_base_again(dtype):
    model = policy(dtype)
    before = digests_of(model.named_weights())
    batch = rollout()
    reference = TorchBackend(policy(dtype), TrainConfig(), None).annotate(batch, Need.REF_LOGPROBS)
    backend = trained(model)
    after = {name.replace(".base_layer", ""): digest for name, digest in digests_of(model.named_weights()).items()}
    assert {name: after[name] for name in before} == before, "the base has its bits"
    alone = backend.base().annotate(batch, Need.REF_LOGPROBS)
    assert torch.equal(alone.ref_logprobs, reference.ref_logprobs)
    now = backend.annotate(batch, Need.OLD_LOGPROBS)
    assert not torch.allclose(now.old_logprobs, alone.ref_logprobs, atol=1e-2)
    stepped = {name: t.clone() for name, t in backend.adapter.tensors().items()}
    weighed = batch.with_(weights=token_mean(batch))
    backend.forward_backward(weighed, sft_loss)
    backend.optim_step()
    assert all(not torch.equal(t, stepped[name]) for name, t in backend.adapter.tensors().items()), "it trains on after it was off"


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_in_a_plain_model_give_the_adapted_models_logits(tied, rslora):
    torch.manual_seed(0)
    hf = Qwen3ForCausalLM._from_config(qwen3(tied=tied), attn_implementation=ATTENTION)
    model = prepare(hf, ModelConfig(path="x", device=DEVICE), trainable=True)
    backend = trained(model, rslora=rslora)
    twin = Qwen3ForCausalLM._from_config(qwen3(tied=tied), attn_implementation="eager").eval()
    assert {name for name, _ in backend.named_weights()} == {name for name, _ in twin.named_parameters()}
    twin.load_state_dict(dict(model.merged_state()), strict=False)
    assert float((logits(twin) - own(model)).abs().max()) < 1e-5
    assert float((logits(twin) - logits(plain(policy()))).abs().max()) > 1e-2
    assert {name for name, _ in model.merged_state()} == {name for name, _ in policy_state(tied)}


def policy_state(tied):
    hf = Qwen3ForCausalLM._from_config(qwen3(tied=tied), attn_implementation=ATTENTION)
    return CausalModel(hf.eval()).named_state()


def test_peft_loads_what_is_exported_and_gives_equal_logits(tmp_path):
    model = policy()
    plain(model).save_pretrained(tmp_path / "base")
    backend = trained(model, rslora=True)
    backend.export(tmp_path / "adapter", str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["use_rslora"], settings["base_model_name_or_path"]) == (4, True, str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert float((logits(theirs) - own(model)).abs().max()) < 1e-6
    backend.export_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert float((logits(merged) - own(model)).abs().max()) < 1e-5


@pytest.mark.parametrize("mixture", [Qwen3MoeConfig, Glm4MoeConfig])
def test_an_adapter_of_a_mixture_is_of_what_peft_can_load_again(mixture, tmp_path):
    """Experts' weights are one tensor, and peft takes layers that are named like an expert's for them."""
    torch.manual_seed(0)
    experts = {"num_experts": 4} if mixture is Qwen3MoeConfig else {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"}
    config = mixture(**{key: getattr(qwen3(), key) for key in sizes}, moe_intermediate_size=16, num_experts_per_tok=2, **experts)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = random_causal(config, ModelConfig(path="x", device=DEVICE), seed=0)
    model.hf.save_pretrained(tmp_path / "base")
    backend = trained(model)
    owners = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in backend.adapter.tensors()}
    assert owners == {"q_proj", "k_proj", "v_proj", "o_proj"}
    backend.export(tmp_path / "adapter", str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert float((logits(theirs) - own(model)).abs().max()) < 1e-5
    with pytest.raises(ValueError, match=r"train\.lora\.target_modules"):
        other = random_causal(config, ModelConfig(path="x", device=DEVICE), seed=0)
        add_adapter(other, LoraConfig(target_modules=["gate_proj", "up_proj"]))


def test_a_score_head_trains_and_is_exported_with_the_adapter(tmp_path):
    config = qwen3()
    config.num_labels = 1
    hf = Qwen3ForSequenceClassification._from_config(config, attn_implementation=ATTENTION)
    model = settle(ScalarModel(hf), ModelConfig(path="x", device=DEVICE), trainable=True)
    hf.save_pretrained(tmp_path / "base")
    backend = backend_of(model)
    with torch.no_grad():
        for tensor in backend.adapter.tensors().values():
            tensor.add_(0.05)
    assert "base_model.model.score.weight" in backend.adapter.tensors()
    backend.export(tmp_path / "adapter", str(tmp_path / "base"))
    base = Qwen3ForSequenceClassification.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert float((logits(theirs) - own(model)).abs().max()) < 1e-5


def test_a_checkpoint_holds_the_adapter_alone_and_refuses_another_base(tmp_path):
    backend = trained(policy())
    backend.save(tmp_path)
    again = backend_of(policy())
    again.load(tmp_path)
    for name, tensor in backend.adapter.tensors().items():
        assert torch.equal(tensor, again.adapter.tensors()[name])
    assert (tmp_path / "weights.safetensors").stat().st_size < 0.6 * sum(p.nbytes for _, p in policy().named_weights())
    with pytest.raises(ValueError, match="has an adapter of another base model"):
        backend_of(policy(seed=1)).load(tmp_path)
    with pytest.raises(ValueError, match="names differ"):
        TorchBackend(policy(), TrainConfig(), 1).load(tmp_path)
    TorchBackend(policy(), TrainConfig(), 1).save(tmp_path / "whole")
    with pytest.raises(ValueError, match="trained whole, not of an adapter"):
        backend_of(policy()).load(tmp_path / "whole")


def test_an_adapter_is_not_read_with_another_scale(tmp_path):
    """It would be another policy: the scale is a factor of what was trained."""
    backend = trained(policy(), alpha=8.0)
    backend.save(tmp_path)
    backend.export(tmp_path / "adapter")
    with pytest.raises(ValueError, match="trained with the scale 2, and"):
        backend_of(policy(), alpha=16.0).load(tmp_path)
    with pytest.raises(ValueError, match="trained with the scale 2, and"):
        backend_of(policy(), alpha=8.0, rslora=True).adapter.read(tmp_path / "adapter" / FILE)
    again = backend_of(policy(), alpha=8.0)
    again.adapter.read(tmp_path / "adapter" / FILE)
    for name, tensor in backend.adapter.tensors().items():
        assert torch.equal(tensor, again.adapter.tensors()[name])


@pytest.mark.parametrize(
    ("targets", "words"),
    [(["no_such_proj"], "does not fit Qwen3ForCausalLM"), (["embed_tokens"], "embed_tokens, which is no linear layer")],
)
def test_layers_that_cannot_have_an_adapter_are_refused(targets, words):
    with pytest.raises(ValueError, match=words):
        add_adapter(policy(), LoraConfig(target_modules=targets))


def test_without_peft_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("whet.model.lora.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'whet\[lora\]'"):
        add_adapter(policy(), LoraConfig())
