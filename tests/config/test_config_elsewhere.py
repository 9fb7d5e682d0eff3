"""Keys of slime, verl and TRL are answered with whet's."""

import re

import pytest

import whet
from whet.config import ConfigError, describe, load_config
from whet.config.elsewhere import NO_SETTING, known_elsewhere, names_elsewhere
from whet.settings.rl import RunConfig
from whet.settings.supervised import RUN_CONFIGS
from whet.typed import check_typed

GOOD = ["model.path=m", "data.train=rows.jsonl", "reward.name=math"]


def told(*overrides):
    with pytest.raises(ConfigError) as error:
        load_config(RunConfig, None, [*GOOD, *overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("n_samples_per_prompt", "8", "in whet it is batch.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "1e-6", "in whet it is train.optim.lr"),
        ("algorithm.filter_groups.enable", "true", "in whet it is control.filters"),
        ("num_generations", "8", "in whet it is batch.samples_per_prompt"),
        ("learning_rate", "1e-5", "in whet it is train.optim.lr"),
        ("swiglu", "true", "whet has no setting: "),
        ("batch_size", "8", "in whet it is batch.prompts_per_rollout, batch.samples_per_prompt"),
        ("sglang_mem_fraction_static", "0.7", "in whet it is engine.embedded.cache_tokens"),
        ("sglang_chunked_prefill_size", "4096", "in whet it is engine.sglang.args.chunked_prefill_size (with engine.name=sglang)"),
        ("actor_rollout_ref.model.override_config.max_position_embeddings", "8192", "in whet it is model.config.max_position_embeddings"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager", "true", "in whet it is engine.vllm.args.enforce_eager"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "true", "in whet it is reference.offload"),
        ("use_rollout_routing_replay", "true", "in whet it is train.routing_replay=rollout"),
        ("actor_rollout_ref.actor.router_replay.mode", "R3", "in whet it is train.routing_replay=old (R2) or rollout (R3)"),
        ("sync.keep", "3", "whet has no setting: the two newest versions stay"),
    ],
)
def test_an_unknown_key_of_others_is_answered(key, value, answer):
    found = told(f"{key}={value}")
    assert f"{key}: unknown key; {answer}" in found


def test_several_keys_of_a_table_of_others_have_an_answer_each():
    found = told("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.rollout.n=5")
    assert "actor.optim.lr: unknown key; in whet it is train.optim.lr" in found
    assert "actor_rollout_ref.rollout.n: unknown key; in whet it is batch.samples_per_prompt" in found


def test_a_key_of_another_command_is_not_answered_with_itself():
    with pytest.raises(ConfigError, match=r"data\.label_key: unknown key; the keys here are") as error:
        load_config(RUN_CONFIGS["sft"], None, ["model.path=m", "data.path=rows.jsonl", "data.label_key=x"])
    assert "in whet it is" not in str(error.value)


def test_options_of_others_are_answered():
    with pytest.raises(ConfigError, match=r"there is no option --lr-decay-style; in whet it is train\.optim\.schedule"):
        check_typed(None, ["--lr-decay-style", "cosine"])


def test_keywords_of_others_are_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"num_generations: unknown key; in whet it is batch\.samples_per_prompt"):
        whet.train("model", [{"prompt": "a", "label": "b"}], reward="math", num_generations=4)


def test_every_answer_names_settings_that_there_are():
    known = {key.path for model in RUN_CONFIGS.values() for key in describe(model)}
    assert len(names_elsewhere()) > 700
    for name, answer in names_elsewhere().items():
        assert answer.strip() and name == name.replace("-", "_")
        if not answer.startswith(NO_SETTING):
            keys = re.findall(r"(?<![\w.\[\]])[a-z_]+(?:\.[a-z_]+|\.<name>)+", re.sub(r"\([^)]*\)", "", answer))
            assert set(keys) <= known, name


MOST_USED = """
    actor_num_gpus_per_node actor_num_nodes hf_checkpoint input_key lr lr_decay_style prompt_data rollout_batch_size
    adam_beta1 context_parallel_size hidden_size num_layers optimizer pipeline_model_parallel_size rollout_shuffle
    tensor_model_parallel_size weight_decay expert_model_parallel_size max_tokens_per_gpu ref_load sequence_parallel
    use_dynamic_batch_size advantage_estimator kl_loss_coef kl_loss_type n_samples_per_prompt num_rollout
    rollout_max_response_len rollout_num_gpus_per_engine entropy_coef recompute_granularity rollout_temperature label_key
    sglang_mem_fraction_static apply_chat_template global_batch_size save save_interval eps_clip rm_type colocate
    balance_data eps_clip_high use_kl_loss load eval_max_response_len eval_prompt_data eval_interval optimizer_cpu_offload
    over_sampling_batch_size dynamic_sampling_filter_path use_tis custom_generate_function_path custom_rm_path
    rollout_function_path sglang_enable_dp_attention sglang_speculative_algorithm data.train_files data.val_files
    data.train_batch_size data.max_prompt_length data.max_response_length data.truncation data.filter_overlong_prompts
    actor_rollout_ref.model.path actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.ppo_mini_batch_size
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_kl_loss
    actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.entropy_coeff
    actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.rollout.name
    actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.gpu_memory_utilization
    actor_rollout_ref.rollout.n actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_p
    actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.ref.megatron.pipeline_model_parallel_size
    algorithm.adv_estimator algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward trainer.logger trainer.project_name
    trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq trainer.total_epochs trainer.val_before_train
    trainer.resume_mode reward_model.reward_kwargs.overlong_buffer_cfg.len reward_model.reward_manager num_generations
    max_completion_length max_prompt_length beta epsilon scale_rewards per_device_train_batch_size
    gradient_accumulation_steps num_train_epochs max_steps learning_rate lr_scheduler_type warmup_ratio max_grad_norm
    logging_steps save_steps output_dir report_to bf16 use_vllm peft_config reward_funcs torch_dtype max_seq_length
    completion_only_loss eval_strategy load_in_4bit push_to_hub
"""
"""Names of slime, verl and TRL that stand in most launch scripts."""


def test_the_names_of_most_scripts_are_known():
    assert [name for name in MOST_USED.split() if known_elsewhere(name) is None] == []


def test_a_key_that_nobody_has_is_not_known():
    assert known_elsewhere("num_rolouts") is None
