"""Keyword arguments of the calls, for editors alone: written by `python docs/write_keywords.py` from the settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

class BatchTable(TypedDict, total=False):
    prompts_per_rollout: int | None
    """Prompts that a rollout takes."""
    samples_per_prompt: int | None
    """Trajectories sampled from each prompt."""
    samples_per_step: int | None
    """Trajectories that one optimizer step learns from (the global batch size)."""
    steps_per_rollout: int | None
    """Optimizer steps that a rollout feeds, per epoch."""
    epochs: int
    """Passes over a rollout's samples; each one divides them into steps again, in a new order."""
    train_on: Literal["model", "all"]
    """Tokens of a rollout that train. model: the tokens that the policy sampled; all: also the environment's answers between them, with the same advantages, as if the policy had sampled them (the trainer's log-prob replaces the engine's)."""
    skip_zero_advantage: bool
    """Leave out of an update's forward and backward passes the samples without a gradient: those whose advantages are all 0 (a group of equal rewards), unless the loss has an entropy bonus, a KL to the reference or a term of your own. The gradient is the same; what an update measures of its tokens (entropy, clip fraction, mismatch, `train_logprobs`) is of the others only. false: compute all."""
    process: str | Callable[..., Any] | None
    """Import reference to a function `(samples, groups) -> samples` that changes a rollout's samples before they are a batch: masks, rewards, which of them count (docs/extending.md)."""

class CheckpointTable(TypedDict, total=False):
    interval: int | None
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the end. none: only at the end."""
    keep: int
    """Checkpoints that stay on disk; older ones are removed."""
    best: str | None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new best saves at once."""
    best_mode: Literal["max", "min"]
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    resume: bool | Literal["fresh"]
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder; fresh: rename the folder, and begin again from the start."""
    async_save: bool
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save waits for the one before."""
    restore: RestoreTable | None
    """Checkpoint that a run without its own checkpoint starts from."""

class ClusterTable(TypedDict, total=False):
    backend: Literal["local", "ray"]
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used unchanged."""
    layout: Literal["colocate", "disaggregate", "async"]
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the engine's processes have their own devices, and take turns with the trainer; async: they have their own devices, and sample while the trainer computes, within control.max_staleness."""
    address: str | None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on this machine for this run."""
    trainer_cpus: float
    """Processors that Ray sets apart for each process of the trainer."""
    trainer_gpus: float | None
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an engine's process is colocated, each of the two gets half of the larger number."""
    engine_cpus: float
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or a layout with separate devices), and for each server."""
    engine_gpus: float | None
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or as many as the server's arguments ask for."""
    private_network: bool
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang) may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    start_timeout_s: float
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""

class ComponentTable(TypedDict, total=False):
    name: str | Callable[..., Any]
    """A built-in (docs/rewards.md lists them) or an import reference to a function (`module:function`, `file.py:function`)."""
    weight: float
    options: Mapping[str, Any]
    """Keyword arguments of the reward."""

class ControlTable(TypedDict, total=False):
    max_staleness: int
    """Age of the oldest token that may be trained: the number of versions that the policy is newer than the version that sampled the token. 0: a rollout ends before its update begins; 1: one rollout is sampled while another is trained on; n: n rollouts are sampled meanwhile."""
    overlap: bool | None
    """Play groups while the trainer computes, so that weights change under them; unset: with max_staleness above 0. It needs an engine with its own copy of the weights."""
    partial: bool
    """Without overlap: keep the unfinished groups of a full rollout with their sampled tokens, and continue them under the next version, instead of aborting them. Their older tokens train within max_staleness."""
    too_old: Literal["mask", "drop", "drop_group"]
    """Treatment of a token older than max_staleness. mask: only this token is not trained; drop: its whole sample is not; drop_group: no sample of its task's group is."""
    max_partial_age: int | None
    """Restart an unfinished group that was started more than this many versions ago; none: never."""
    over_sample: float
    """Without overlap: number of groups that are played for each group still missing. The surplus is aborted when the rollout is full, and its tasks come first in the next rollout."""
    max_groups: int | None
    """Groups played at a time, at most; none: no limit."""
    filters: Sequence[FilterTable]
    """Rules by which finished groups are dropped; others are played in their place (dynamic sampling)."""
    refill: bool
    """Play further groups in place of those that filters drop. false (without overlap): play over_sample times as many groups as needed and no more; if too few of them pass, the first dropped ones (by the start of their play) are trained on all the same."""
    give_up_after: int
    """Stop after this many times prompts_per_rollout groups were dropped in a row."""
    order: str | Callable[..., Any] | None
    """Order in which finished groups are trained on: an import reference to a function that sorts them; none: by the start of their play."""
    retries: int
    """Number of times that a trajectory is played again, with the same seed, if its engine, environment or reward failed or was too slow. Not with deterministic=true."""
    retry_budget: int | None
    """Retries in all between two updates; none: any number."""
    rollout: str | Callable[..., Any] | None
    """Import reference to an async function `(ask) -> groups`, or to a class of such, that plays whole rollouts in place of whet's scheduler (docs/extending.md). Of the settings of this table, only max_staleness, overlap and too_old then count."""
    max_error_rate: float
    """Stop when a greater share of the last trajectories failed; 1: never. A rollout in which every trajectory failed always stops the run."""
    error_window: int
    """Number of last trajectories over which max_error_rate is counted. At least a rollout's worth is counted, so that a few failures in a small rollout stop nothing."""

class CorrectionTable(TypedDict, total=False):
    preset: Literal["disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis"] | None
    """One of verl's named presets; settings given here override it."""
    weights: Literal["token", "sequence", "geometric"] | None
    """Level of the ratio that weighs a token: the token's own (token), the product over its sample (sequence), or the geometric mean over its sample (geometric); unset: no weights."""
    bound: Literal["truncate", "clip", "icepop", "mask"]
    """Treatment of ratios outside [low, high]. truncate: at most high; clip: into the bounds; icepop: weight 0; mask: rejected."""
    high: float
    """Upper bound of a weight."""
    low: float | None
    """Lower bound; unset: 1 / high."""
    normalize: bool
    """Divide weights by their mean over the step's trained tokens (which with rejected=mask are the kept ones)."""
    reject: Sequence[RejectionTable]
    """Rules of rejection. A token trains if every rule keeps it."""
    veto: float | None
    """Reject every token of a sample in which some token's ratio pi_train / pi_rollout is below this."""
    rejected: Literal["weigh", "mask"]
    """weigh: a rejected token has weight 0 and still counts in denominators (slime); mask: it is masked before credit is assigned, as if it had not been sampled (verl)."""

class CriticOptimTable(TypedDict, total=False):
    name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    lr: float
    """Peak learning rate."""
    betas: Sequence[float]
    """Decay of the two moments."""
    eps: float
    """Added to the root of the second moment."""
    momentum: float
    """Momentum of muon."""
    weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""

class CriticTable(TypedDict, total=False):
    path: str | None
    """A folder or a name on the hub: a language model, whose scores then begin at 0, or a reward model, whose head is kept. Unset: the policy's model."""
    optim: CriticOptimTable
    """The critic's own optimizer."""
    parallel: ParallelTable | None
    """Layout of the critic over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""
    warmup_rollouts: int
    """Number of rollouts at the start in which only the critic learns, and the policy stays unchanged."""

class DpoTable(TypedDict, total=False):
    loss: Literal["sigmoid", "ipo"]
    """sigmoid: -log sigmoid(beta h - margin) (DPO); ipo: (h - 1/(2 beta))^2 (IPO, arXiv 2310.12036)."""
    beta: float
    """Strength of the pull towards the reference: the larger, the closer the policy stays to it."""
    label_smoothing: float
    """Share of pairs that are taken to be labelled the wrong way round (conservative DPO); sigmoid only."""
    length_normalize: bool | None
    """Log-ratios as means over a reply's trained tokens instead of sums; unset: means for ipo, sums for sigmoid."""
    sft_coef: float
    """Weight of the chosen reply's negative log-likelihood per token, on top (RPO, arXiv 2404.19733, which uses 1)."""

class EmbeddedTable(TypedDict, total=False):
    cache_tokens: int | None
    """Tokens that the KV cache holds, over all sequences. Unset: as many as the sequences that run together may have, within a fifth of the device's memory."""
    block_size: int
    """Tokens per cache block."""
    max_running: int
    """Sequences that run at a time; more wait."""
    max_batch_tokens: int
    """Tokens that one step computes at most: long prompts are prefilled in chunks, mixed with decoding."""
    compiled: bool
    """Decode on CPUs with code that is compiled on first use (by the installed C compiler, in about a second): Llama, Mistral, Qwen2 and Qwen3 in float32. Other models, and machines without a compiler, decode with torch, and a warning says why."""
    static_decode: bool
    """Decode in steps of fixed shapes, padded to powers of two. On CUDA each is captured as a graph and replayed; that was never run on a GPU, so compare before you rely on it. On a CPU the same steps are computed, slower than others."""
    own_weights: bool
    """Keep a copy of the weights in memory of the engine's own, brought up to date at every version; false: read the trainer's."""
    copies: int
    """Copies of the engine. 1: it runs in the trainer's process; more: each copy runs in a process of its own with the sizes above, and all share one copy of the weights in shared memory."""
    tensor_parallel: int
    """Processes of each copy: the model's layers are cut over them by the model's own plan, the cache by its heads of keys and values; they decode with torch. 1: a copy is one process."""
    copy_devices: Sequence[str]
    """Device of each copy, or of each of its processes (`cuda:1`; each then has its own weights there). Empty: the CPU for all, or, if the model is on a GPU, one GPU after the other."""

class EngineTable(TypedDict, total=False):
    name: Literal["embedded", "vllm", "sglang"]
    """Engine that samples: embedded, which is whet's own, or vllm or sglang, whose servers have environments of their own (docs/engines.md)."""
    urls: Sequence[str]
    """Servers that run already (`http://HOST:PORT`); their key is read from the environment variable WHET_ENGINE_KEY. Empty: whet starts them."""
    router: str | None
    """Address of a router before the servers of `urls`: it chooses who samples, and weights go to each server."""
    servers: int
    """Servers that whet starts: on this machine, or, with cluster.backend=ray, on the nodes that Ray places them on."""
    python: str
    """Python of the environment that has the servers: vLLM and whet-vllm, or SGLang."""
    quantization: str | None
    """Format of the servers' weights, which are quantized from the trainer's as they are written: fp8 (blocks of 128 x 128), int4 (groups of 128, or 64 or 32), or a quantized checkpoint (folder or hub name), whose format is taken and with which servers start. Unset: the trainer's type."""
    vllm: VllmTable
    """Servers of vLLM."""
    sglang: SglangTable
    """Servers of SGLang."""
    embedded: EmbeddedTable
    """The engine in the trainer's process."""
    pool: PoolTable
    """Restarts, health checks and deadlines of the engine's processes, if it has its own."""
    sleep: bool | None
    """Free the memory of the engine's caches, and of its own copy of the weights, while the trainer computes; new weights wake the engine. Unset: only if the engine has its own processes on the trainer's GPUs and sampling does not overlap training."""

class EnvTable(TypedDict, total=False):
    name: str | Callable[..., Any]
    """A built-in (docs/environments.md) or an import reference to a class or function that makes an environment."""
    options: Mapping[str, Any]
    """Keyword arguments of the environment: of an import reference, or of a built-in that has options."""
    tools: Sequence[str | Callable[..., Any] | Mapping[str, Any]]
    """For tools: built-in names (docs/mcp.md) and import references to typed functions with a docstring. A table has the `name` of a factory of tools, and its keyword arguments."""
    tool_timeout_s: float | None
    """Seconds that one tool call may take; a call over it makes the trajectory a timeout. none: any time."""
    max_calls_per_turn: int
    """Tool calls of one turn that are run; further ones are answered with an error."""
    max_reply_chars: int
    """Longer replies lose a part: those of tools, of a simulated user, and of other players in a game."""
    reply_cut: Literal["head", "middle", "tail"]
    """Part that they lose: the head, the middle or the tail."""
    sandbox: SandboxTable
    """The place of the tools python, shell and files, of programs, and of servers that are to run in it (docs/sandbox.md)."""
    parser: str | Callable[..., Any]
    """Format of the model's tool calls. auto: as its chat template tells; hermes, qwen_xml, llama3, deepseek_v3, deepseek_v31, dsml, glm, kimi, harmony, tags, none (docs/tool_formats.md), or an import reference to a function."""

class EvaluateTable(TypedDict, total=False):
    interval: int | None
    """Rollouts between two evaluations; unset: evaluate only at the end."""
    before_training: bool
    """Also before the first rollout."""
    sets: Mapping[str, EvaluationSetTable]
    """The sets, by name."""

class EvaluationSetTable(TypedDict, total=False):
    path: Any
    """Data files, as in data.train; `test.jsonl@[100:200]` takes a slice of the rows."""
    rows: RowTable | None
    """Column names that differ from those in [data]."""
    limit: int | None
    """Evaluate only this many tasks, the first ones; unset: all."""
    samples_per_prompt: int
    """Trajectories of each prompt: n of mean@n and pass@k."""
    rollout: RolloutOverridesTable
    """Sampling and limits that differ from training's."""
    env: EnvTable | None
    """Environment settings that differ from training's; with a `name` here nothing is taken over from training's."""
    reward: RewardChoiceTable | None
    """Reward, if it differs; training's processes score it, too."""
    pass_reward: float
    """A trajectory whose reward, with those of its tokens, is at least this passes, for pass@k."""

class FilterTable(TypedDict, total=False):
    name: str | Callable[..., Any]
    """Rule: zero_std, all_right, all_wrong, length, or an import reference to a function (`module:function`, `file.py:function`) of a group that returns the reason to drop it, or None."""
    options: Mapping[str, Any]
    """Keyword arguments of the function."""

class GroupRewardTable(TypedDict, total=False):
    name: str | Callable[..., Any]
    """Import reference to a function `(trajectories, **options) -> list`: one score for each of those that ended well (docs/extending.md)."""
    options: Mapping[str, Any]
    """Keyword arguments of the function."""

class HeldOutTable(TypedDict, total=False):
    path: Any
    """File, folder or hub data set, with the columns of `[data]`; unset: nothing is held out."""
    interval: int | None
    """Steps between two evaluations; another one follows at the end. none: only at the end."""
    before_training: bool
    """Also before the first step."""

class LoraTable(TypedDict, total=False):
    rank: int
    """Rows of A, columns of B."""
    alpha: float
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    target_modules: Literal["all-linear"] | Sequence[str]
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj, up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example ["q_proj", "v_proj"]."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    init: Literal["kaiming", "gaussian"]
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    export_merged: bool
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged into its weights to `<run_dir>/merged`."""

class LossTable(TypedDict, total=False):
    name: str | Callable[..., Any]
    """Policy loss: clip, sequence (GSPO), cispo, sapo, reinforce, geometric_mean (GMPO), clip_cov, kl_cov, or an import reference `module:function` called with (batch, logprobs, old_logprobs, options) that returns core.losses.ClipTerms."""
    sequence_gradient: Literal["token", "sequence"]
    """sequence: path of the gradient of a sample's ratio: token (verl's form) or sequence (slime's)."""
    tau_positive: float
    """sapo: steepness of the gate for positive advantages."""
    tau_negative: float
    """sapo: steepness of the gate for negative advantages."""
    covariance_share: float
    """clip_cov, kl_cov: share of the step's tokens that is held back."""
    covariance_bounds: Sequence[float]
    """clip_cov: range of covariance from which tokens are chosen."""
    covariance_kl_coef: float
    """kl_cov: weight of |log ratio| for the chosen tokens."""
    options: Mapping[str, Any]
    """Options of a loss of your own."""

class ObserveTable(TypedDict, total=False):
    trackers: Sequence[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"] | str | Callable[..., Any]]
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    prometheus: str | None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    show: int
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    display: Literal["auto", "rich", "plain", "none"]
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    on_rollout: str | Callable[..., Any] | None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every rollout after its update and may return further metrics, by name (docs/extending.md)."""
    records: RecordsTable
    """Records of every token."""
    peak_tflops: float | None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs whose sheet whet does not know, there is no `train/mfu`."""

class OptimTable(TypedDict, total=False):
    name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    lr: float
    """Peak learning rate."""
    betas: Sequence[float]
    """Decay of the two moments."""
    eps: float
    """Added to the root of the second moment."""
    momentum: float
    """Momentum of muon."""
    weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""

class ParallelTable(TypedDict, total=False):
    replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""

class PoolTable(TypedDict, total=False):
    restarts: int
    """Restarts of each member after it died or hung, or failed to restart. Ten minutes of service set the count back to 0. After the last restart the member is given up, and the others continue. 0: never restart. With `deterministic` a lost member ends the run."""
    start_timeout_s: float
    """Seconds for a member to start: to import torch, to attach to the weights and, if it has its own device, to move them there."""
    health_timeout_s: float
    """Seconds for a member to answer a health check, a call that computes nothing. After that the member counts as hung: it is killed and restarted."""
    step_timeout_s: float
    """Seconds that one step of a member, or one score, may take. After that the member counts as hung, even if it still answers health checks."""
    update_timeout_s: float
    """Seconds for a member to take over new weights. After that the member counts as hung; the version rests on the receipts of the others, and the member serves again once it holds the same weights. A shorter `sync.timeout_s` ends the run instead. If all members take part in one exchange (`sync.transport=broadcast`), the shorter of the two ends the run."""

class RecordsTable(TypedDict, total=False):
    every: int
    """Record every n-th rollout; 0 never does."""
    trajectories: int | None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row. Unset: all."""
    keep: int | None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""

class ReferenceTable(TypedDict, total=False):
    path: str | None
    """A folder or a name on the hub; unset: the policy's first weights, also where `checkpoint.restore` gave them. Of a policy that is an adapter: its base."""
    refresh_every: int | None
    """Rollouts after which the reference becomes a copy of the policy, each time; unset: the reference never changes."""
    offload: bool
    """Keep its weights in the CPU's memory, and on the device only while its log-probs are computed; on a mesh, one layer after another."""
    parallel: ParallelTable | None
    """Layout of the reference over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""

class RejectionTable(TypedDict, total=False):
    statistic: Literal["token_k1", "token_k2", "token_k3", "sum_k1", "sum_k2", "sum_k3", "mean_k1", "mean_k2", "mean_k3", "max_k2", "max_k3"]
    """token_, sum_, mean_ or max_ (over a sample), of k1, k2 or k3."""
    high: float
    """Largest value; for k1 the largest ratio pi_rollout / pi_train."""
    low: float | None
    """For k1 the smallest ratio; unset: 1 / high."""

class RestoreTable(TypedDict, total=False):
    path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    parts: Sequence[Literal["weights", "optimizer", "data", "random", "counters"]]
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the schedule); data (the cursor); random (generators' states); counters. With all of them the run continues exactly as the other would have."""

class RewardChoiceTable(TypedDict, total=False):
    name: str | Callable[..., Any] | None
    """A built-in (docs/rewards.md lists them) or an import reference to a function (`module:function`, `file.py:function`)."""
    options: Mapping[str, Any]
    """Keyword arguments of the reward `name`."""
    components: Mapping[str, ComponentTable]
    """Several rewards by a name of your choice; the total is their weighted sum."""
    group: GroupRewardTable | None
    """A reward of all siblings of a task together, computed after each has ended and was scored by itself; it replaces their rewards. If it fails, all siblings have failed, and they are not played again (control.retries)."""
    score_key: str | None
    """Key of the reward if a function returns a mapping; its other numbers are components. Unset: `total`, or the sum."""
    timeout_s: float
    """Seconds for each call, counted from its start in a worker, and for each request of a reward that asks a server."""

class RewardKLTable(TypedDict, total=False):
    coef: float
    """Each trained token's reward is lowered by coef times its KL."""
    estimator: Literal["k1", "k2", "k3", "low_var", "abs"]
    """Estimator of the KL from the sampled tokens."""
    target: float | None
    """Adapt the coefficient so that the KL of a trajectory's mean token stays near this; unset: a fixed coefficient."""
    horizon: int
    """Trajectories over which a deviation of 20% changes the coefficient by 20%."""

class RewardModelTable(TypedDict, total=False):
    center_coef: float
    """Weight of (score(chosen) + score(rejected))^2 on top, which keeps scores around 0 (arXiv 2312.09244, which uses 0.01)."""

class RolloutOverridesTable(TypedDict, total=False):
    temperature: float
    """0 is greedy."""
    top_p: float | None
    """Sample from the most likely tokens that together have this probability. In training the ids of those tokens are recorded with every sampled token, and all log-probs are renormalised over them; with `top_k` there are never more than that number."""
    top_k: int | None
    """Sample from this many most likely tokens; 0: from all. Recorded in training as for `top_p`."""
    min_p: float | None
    """Leave out tokens less likely than this fraction of the most likely one; other than 0 in evaluation only."""
    repetition_penalty: float | None
    """Make tokens of the context and the reply less likely, by this factor on their logits; other than 1 in evaluation only."""
    presence_penalty: float | None
    """Penalty subtracted from the logit of each token that occurred in the turn; other than 0 in evaluation only."""
    frequency_penalty: float | None
    """Penalty subtracted from a token's logit for each time that the token occurred in the turn; other than 0 in evaluation only."""
    min_tokens: int | None
    """Least number of tokens of a turn, unless a limit cuts it; other than 0 in evaluation only."""
    json_schema: str | None
    """JSON schema, as text, that every turn keeps to (needs `whet[grammar]`); other than none in evaluation only."""
    regex: str | None
    """Regular expression that every turn matches as a whole (needs `whet[grammar]`); other than none in evaluation only."""
    max_turns: int | None
    """Model calls of a trajectory, at most. A plain question takes one."""
    max_tokens: int | None
    """Tokens of a whole trajectory, at most: prompt, replies and the environment's answers. The default is less for a model with fewer positions, or a cache with less room."""
    max_turn_tokens: int | None
    """Tokens sampled in one turn, at most."""
    stop: Sequence[str] | None
    """Texts that end a turn, such as `</search>`; they stay in the turn, to the end of the token that completes one."""
    timeout_s: float | None
    """Seconds that a trajectory may take, from its start to its reward. It is started when the engine has a place for it, so waiting for one does not count. none: any time."""

class RolloutTable(TypedDict, total=False):
    temperature: float
    """Temperature of every turn; 0 is greedy (evaluation only)."""
    top_p: float
    """Sample from the most likely tokens that together have this probability. In training the ids of those tokens are recorded with every sampled token, and all log-probs are renormalised over them; with `top_k` there are never more than that number."""
    top_k: int
    """Sample from this many most likely tokens; 0: from all. Recorded in training as for `top_p`."""
    min_p: float
    """Leave out tokens less likely than this fraction of the most likely one; other than 0 in evaluation only."""
    repetition_penalty: float
    """Make tokens of the context and the reply less likely, by this factor on their logits; other than 1 in evaluation only."""
    presence_penalty: float
    """Penalty subtracted from the logit of each token that occurred in the turn; other than 0 in evaluation only."""
    frequency_penalty: float
    """Penalty subtracted from a token's logit for each time that the token occurred in the turn; other than 0 in evaluation only."""
    min_tokens: int
    """Least number of tokens of a turn, unless a limit cuts it; other than 0 in evaluation only."""
    json_schema: str | None
    """JSON schema, as text, that every turn keeps to (needs `whet[grammar]`); other than none in evaluation only."""
    regex: str | None
    """Regular expression that every turn matches as a whole (needs `whet[grammar]`); other than none in evaluation only."""
    max_turns: int
    """Model calls of a trajectory, at most. A plain question takes one."""
    max_tokens: int
    """Tokens of a whole trajectory, at most: prompt, replies and the environment's answers. The default is less for a model with fewer positions, or a cache with less room."""
    max_turn_tokens: int
    """Tokens sampled in one turn, at most."""
    stop_token_ids: Sequence[int]
    """Tokens that end a turn besides the tokenizer's own; they stay in the turn."""
    stop: Sequence[str]
    """Texts that end a turn, such as `</search>`; they stay in the turn, to the end of the token that completes one."""
    timeout_s: float | None
    """Seconds that a trajectory may take, from its start to its reward. It is started when the engine has a place for it, so waiting for one does not count. none: any time."""
    play: str | Callable[..., Any] | None
    """Import reference to an async function that plays each trajectory in place of taking turns with the environment (docs/extending.md)."""

class RowTable(TypedDict, total=False):
    prompt_key: str
    """Column of the prompt: text, or a list of OpenAI messages."""
    prompt_template: str | None
    """Builds the prompt from columns instead: each {column} is replaced by the row's value; {{ and }} are braces."""
    system_prompt: str | None
    """System message for the prompts that have none."""
    chat: bool | Literal["strip"]
    """Render prompts with the chat template. What was sampled stays; "strip": where the template leaves the thinking of earlier turns out, the next turn begins a new training sample without it. false: a prompt is text that is used unchanged, without a chat template."""
    label_key: str | None
    """Column of what is known about the answer: text or a number."""
    label_pattern: str | None
    """Regular expression with one group: the part of the label that counts, for example "#### (.+)"."""
    metadata_key: str | None
    """Column of anything a reward or an environment wants to know: an object or a JSON string of one. The other columns that nothing above names are part of the metadata, too, under their own names. none: rows bring no metadata."""
    tools_key: str | None
    """Column of the tools the row brings along: a list of OpenAI schemas or a JSON string of one."""

class SandboxTable(TypedDict, total=False):
    kind: Literal["local", "docker", "fusion"]
    """local: processes of this machine, isolated as its kernel allows; docker: a container for each trajectory; fusion: a server of SandboxFusion's protocol."""
    at: str
    """The image of docker's containers, which has python and sh (`python:3.12-slim`); or the address of the server (`http://HOST:8080`)."""
    unsafe: bool
    """Run without isolation where this machine allows none. What the model writes can then do all that you can."""
    timeout_s: float
    """Seconds after which a call is ended, which its answer says; less than `env.tool_timeout_s`."""
    memory_mb: int
    """Memory of all processes of a call, in MiB."""
    max_processes: int
    """Processes and threads of a call."""
    disk_mb: int
    """Size of a trajectory's folder, in MiB. Where there are namespaces it is in memory."""
    paths: Sequence[str]
    """Further files and folders of this machine that programs may read, by their full paths."""

class SglangTable(TypedDict, total=False):
    args: Mapping[str, Any]
    """Arguments of the servers by SGLang's own names, with underscores (`{tp_size = 2}`); true: a switch. whet sets `model_path`, `host`, `port`, and how replies are streamed."""

class SyncTable(TypedDict, total=False):
    transport: Literal["auto", "shared", "ipc", "broadcast", "disk", "delta"]
    """Transport of weights. shared: one file in the machine's memory, which all engines map; ipc: memory of the trainer's device that engines on the same machine open; broadcast: a process group (gloo; to SGLang's servers NCCL on GPUs); disk: a folder in Hugging Face format for each version; delta: only the changes since the version before, compressed; auto: shared."""
    timeout_s: float
    """Seconds that an engine may take over a version before the run stops. By broadcast and ipc they bound each of these waits: for the engine to arrive, for a message, and, once everything is sent, for the engine's answer."""
    max_buffer_bytes: int
    """Size in bytes. ipc and broadcast: weights in flight at a time, in addition to the tensor being gathered; disk: a file of weights."""
    folder: str | None
    """disk and delta: folder of the versions, on a file system that trainer and engines share; unset: `sync` in the run's folder."""

class TeacherTable(TypedDict, total=False):
    path: str
    """A folder or a name on the hub; its tokenizer must be the policy's. With `urls` nothing else of it is read."""
    urls: Sequence[str]
    """Servers that run already with this model (`http://HOST:PORT`, of vLLM, SGLang or `whet serve`) and compute its log-probs; their key is read from WHET_ENGINE_KEY. Empty: the trainer's processes compute them."""
    timeout_s: float
    """Seconds that a server may take for the log-probs of a sample."""
    parallel: ParallelTable | None
    """Layout of the teacher over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""

class TrainTable(TypedDict, total=False):
    optim: OptimTable
    """The optimizer and its schedule."""
    offload: bool
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there. The device then holds one copy of the weights, and every step waits for the transfer both ways."""
    max_tokens_per_device: int
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are computed once. A longer sample gets its own row."""
    rows: Literal["auto", "forest", "chains"]
    """Computation of shared beginnings. forest: the common beginning of samples is computed once, forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of tokens that was saved."""
    lora: LoraTable | None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    freeze: Sequence[str]
    """Parameters that do not train, by their names in the model's files: `*` is any text, and with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train; ["*", "!*.layers.27.*"]: one layer does."""
    parallel: ParallelTable | Literal["auto"] | None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices' memory the one whose exchanges take the least time, printed when the run begins."""
    exchange_timeout_s: float
    """Seconds that a process waits for the others in an exchange, before the run ends and names the missing ones. It must cover the largest difference in computing time between two exchanges."""
    compile: bool
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    routing_replay: Literal["off", "old", "rollout"]
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their gradient."""
    logprob_chunk_tokens: int | None
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""

class VllmTable(TypedDict, total=False):
    args: Mapping[str, Any]
    """Arguments of the servers by vLLM's own names, with underscores (`{tensor_parallel_size = 2}`); true: a switch. whet sets `model`, `host`, `port`, and what log-probs and weights need."""

class TrainSettings(TypedDict, total=False):
    run_dir: str
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model. If the command line's file does not name it, it is runs/FILE-TIME, and an unfinished run of the file with the same settings is continued."""
    seed: int
    """Seed of everything random: data order, sampling, shuffles."""
    deterministic: bool
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on the duration of tool calls."""
    threads: int | None
    """CPU threads for torch; unset: torch's choice."""
    model__path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    model__dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Type of parameters and computation. With bfloat16 and float16 the optimizer keeps float32 master weights; with float16 the loss is scaled, too, and a step whose gradients overflow is computed again."""
    model__config: Mapping[str, Any]
    """Values in place of those in the model's config.json, such as `{max_position_embeddings = 32768}` for longer sequences, or its rotary scaling. A trained model keeps them."""
    model__device: str
    """auto picks cuda, then mps, then cpu."""
    model__trust_remote_code: bool
    """Allow code that comes with the model to run."""
    model__gradient_checkpointing: bool | Literal["selective"]
    """Recompute each layer's activations in the backward pass: least memory, about a third more compute; selective: keep the results of matrix products and attention, and recompute the rest, for a few per cent."""
    model__gradient_checkpointing_every: int
    """Recompute one of this many layers; the others keep all their activations."""
    train: TrainTable
    """Optimizer and token budget."""
    train__optim: OptimTable
    """The optimizer and its schedule."""
    train__optim__name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    train__optim__lr: float
    """Peak learning rate."""
    train__optim__betas: Sequence[float]
    """Decay of the two moments."""
    train__optim__eps: float
    """Added to the root of the second moment."""
    train__optim__momentum: float
    """Momentum of muon."""
    train__optim__weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    train__optim__clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    train__optim__schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    train__optim__warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    train__optim__min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""
    train__offload: bool
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there. The device then holds one copy of the weights, and every step waits for the transfer both ways."""
    train__max_tokens_per_device: int
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are computed once. A longer sample gets its own row."""
    train__rows: Literal["auto", "forest", "chains"]
    """Computation of shared beginnings. forest: the common beginning of samples is computed once, forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of tokens that was saved."""
    train__lora: LoraTable | None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    train__lora__rank: int
    """Rows of A, columns of B."""
    train__lora__alpha: float
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    train__lora__target_modules: Literal["all-linear"] | Sequence[str]
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj, up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example ["q_proj", "v_proj"]."""
    train__lora__rslora: bool
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    train__lora__init: Literal["kaiming", "gaussian"]
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    train__lora__export_merged: bool
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged into its weights to `<run_dir>/merged`."""
    train__freeze: Sequence[str]
    """Parameters that do not train, by their names in the model's files: `*` is any text, and with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train; ["*", "!*.layers.27.*"]: one layer does."""
    train__parallel: ParallelTable | Literal["auto"] | None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices' memory the one whose exchanges take the least time, printed when the run begins."""
    train__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    train__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    train__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    train__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    train__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    train__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    train__exchange_timeout_s: float
    """Seconds that a process waits for the others in an exchange, before the run ends and names the missing ones. It must cover the largest difference in computing time between two exchanges."""
    train__compile: bool
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    train__routing_replay: Literal["off", "old", "rollout"]
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their gradient."""
    train__logprob_chunk_tokens: int | None
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""
    observe: ObserveTable
    """Display, trackers and records."""
    observe__trackers: Sequence[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"] | str | Callable[..., Any]]
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    observe__prometheus: str | None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    observe__show: int
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    observe__display: Literal["auto", "rich", "plain", "none"]
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    observe__on_rollout: str | Callable[..., Any] | None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every rollout after its update and may return further metrics, by name (docs/extending.md)."""
    observe__records: RecordsTable
    """Records of every token."""
    observe__records__every: int
    """Record every n-th rollout; 0 never does."""
    observe__records__trajectories: int | None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row. Unset: all."""
    observe__records__keep: int | None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""
    observe__peak_tflops: float | None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs whose sheet whet does not know, there is no `train/mfu`."""
    checkpoint: CheckpointTable
    """When to save."""
    checkpoint__interval: int | None
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the end. none: only at the end."""
    checkpoint__keep: int
    """Checkpoints that stay on disk; older ones are removed."""
    checkpoint__best: str | None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new best saves at once."""
    checkpoint__best_mode: Literal["max", "min"]
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    checkpoint__resume: bool | Literal["fresh"]
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder; fresh: rename the folder, and begin again from the start."""
    checkpoint__async_save: bool
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save waits for the one before."""
    checkpoint__restore: RestoreTable | None
    """Checkpoint that a run without its own checkpoint starts from."""
    checkpoint__restore__path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    checkpoint__restore__parts: Sequence[Literal["weights", "optimizer", "data", "random", "counters"]]
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the schedule); data (the cursor); random (generators' states); counters. With all of them the run continues exactly as the other would have."""
    cluster: ClusterTable
    """Placement of the run's processes."""
    cluster__backend: Literal["local", "ray"]
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used unchanged."""
    cluster__layout: Literal["colocate", "disaggregate", "async"]
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the engine's processes have their own devices, and take turns with the trainer; async: they have their own devices, and sample while the trainer computes, within control.max_staleness."""
    cluster__address: str | None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on this machine for this run."""
    cluster__trainer_cpus: float
    """Processors that Ray sets apart for each process of the trainer."""
    cluster__trainer_gpus: float | None
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an engine's process is colocated, each of the two gets half of the larger number."""
    cluster__engine_cpus: float
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or a layout with separate devices), and for each server."""
    cluster__engine_gpus: float | None
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or as many as the server's arguments ask for."""
    cluster__private_network: bool
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang) may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    cluster__start_timeout_s: float
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""
    num_rollouts: int | None
    """Rollouts of the run; or give num_epochs."""
    num_epochs: float | None
    """Passes over the prompts; num_rollouts follows from it."""
    stop_after_constant_rewards: int | None
    """Stop after this many rollouts, counted from the start of the run, in which every trajectory got the same reward; none: never stop for it. A run that learns from a teacher does not stop for it."""
    data__template: str | None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    data__template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as enable_thinking."""
    data__special_tokens_in_text: bool
    """Turn special tokens spelled in a text (of a data row, a user, a tool or its schema) into real ones, as if the template had written them; false: they stay text, and are counted."""
    data__prompt_key: str
    """Column of the prompt: text, or a list of OpenAI messages."""
    data__prompt_template: str | None
    """Builds the prompt from columns instead: each {column} is replaced by the row's value; {{ and }} are braces."""
    data__system_prompt: str | None
    """System message for the prompts that have none."""
    data__chat: bool | Literal["strip"]
    """Render prompts with the chat template. What was sampled stays; "strip": where the template leaves the thinking of earlier turns out, the next turn begins a new training sample without it. false: a prompt is text that is used unchanged, without a chat template."""
    data__label_key: str | None
    """Column of what is known about the answer: text or a number."""
    data__label_pattern: str | None
    """Regular expression with one group: the part of the label that counts, for example "#### (.+)"."""
    data__metadata_key: str | None
    """Column of anything a reward or an environment wants to know: an object or a JSON string of one. The other columns that nothing above names are part of the metadata, too, under their own names. none: rows bring no metadata."""
    data__tools_key: str | None
    """Column of the tools the row brings along: a list of OpenAI schemas or a JSON string of one."""
    data__train: Any
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    data__source: str | Callable[..., Any] | None
    """In place of `train`: a built-in (docs/environments.md), or an import reference to a function or class `(seed, **source_options) -> whet.data.source.Source` (docs/extending.md)."""
    data__source_options: Mapping[str, Any]
    """Keyword arguments of the source."""
    data__source_timeout_s: float
    """Seconds that each call of the source may take."""
    data__max_prompt_tokens: int | None
    """Tokens of the longest prompt that is played; see `long_prompts`."""
    data__long_prompts: Literal["drop", "error", "left", "middle", "right"]
    """Treatment of longer prompts. drop: they are not played, and counted; error: the run does not start; left, middle, right: the beginning, the middle or the end of the prompt's longest message is cut."""
    data__shuffle: bool
    """A new order in every epoch; false: the order of the files."""
    batch: BatchTable
    """Batch arithmetic."""
    batch__prompts_per_rollout: int | None
    """Prompts that a rollout takes."""
    batch__samples_per_prompt: int | None
    """Trajectories sampled from each prompt."""
    batch__samples_per_step: int | None
    """Trajectories that one optimizer step learns from (the global batch size)."""
    batch__steps_per_rollout: int | None
    """Optimizer steps that a rollout feeds, per epoch."""
    batch__epochs: int
    """Passes over a rollout's samples; each one divides them into steps again, in a new order."""
    batch__train_on: Literal["model", "all"]
    """Tokens of a rollout that train. model: the tokens that the policy sampled; all: also the environment's answers between them, with the same advantages, as if the policy had sampled them (the trainer's log-prob replaces the engine's)."""
    batch__skip_zero_advantage: bool
    """Leave out of an update's forward and backward passes the samples without a gradient: those whose advantages are all 0 (a group of equal rewards), unless the loss has an entropy bonus, a KL to the reference or a term of your own. The gradient is the same; what an update measures of its tokens (entropy, clip fraction, mismatch, `train_logprobs`) is of the others only. false: compute all."""
    batch__process: str | Callable[..., Any] | None
    """Import reference to a function `(samples, groups) -> samples` that changes a rollout's samples before they are a batch: masks, rewards, which of them count (docs/extending.md)."""
    rollout: RolloutTable
    """Sampling and limits of a trajectory."""
    rollout__temperature: float
    """Temperature of every turn; 0 is greedy (evaluation only)."""
    rollout__top_p: float
    """Sample from the most likely tokens that together have this probability. In training the ids of those tokens are recorded with every sampled token, and all log-probs are renormalised over them; with `top_k` there are never more than that number."""
    rollout__top_k: int
    """Sample from this many most likely tokens; 0: from all. Recorded in training as for `top_p`."""
    rollout__min_p: float
    """Leave out tokens less likely than this fraction of the most likely one; other than 0 in evaluation only."""
    rollout__repetition_penalty: float
    """Make tokens of the context and the reply less likely, by this factor on their logits; other than 1 in evaluation only."""
    rollout__presence_penalty: float
    """Penalty subtracted from the logit of each token that occurred in the turn; other than 0 in evaluation only."""
    rollout__frequency_penalty: float
    """Penalty subtracted from a token's logit for each time that the token occurred in the turn; other than 0 in evaluation only."""
    rollout__min_tokens: int
    """Least number of tokens of a turn, unless a limit cuts it; other than 0 in evaluation only."""
    rollout__json_schema: str | None
    """JSON schema, as text, that every turn keeps to (needs `whet[grammar]`); other than none in evaluation only."""
    rollout__regex: str | None
    """Regular expression that every turn matches as a whole (needs `whet[grammar]`); other than none in evaluation only."""
    rollout__max_turns: int
    """Model calls of a trajectory, at most. A plain question takes one."""
    rollout__max_tokens: int
    """Tokens of a whole trajectory, at most: prompt, replies and the environment's answers. The default is less for a model with fewer positions, or a cache with less room."""
    rollout__max_turn_tokens: int
    """Tokens sampled in one turn, at most."""
    rollout__stop_token_ids: Sequence[int]
    """Tokens that end a turn besides the tokenizer's own; they stay in the turn."""
    rollout__stop: Sequence[str]
    """Texts that end a turn, such as `</search>`; they stay in the turn, to the end of the token that completes one."""
    rollout__timeout_s: float | None
    """Seconds that a trajectory may take, from its start to its reward. It is started when the engine has a place for it, so waiting for one does not count. none: any time."""
    rollout__play: str | Callable[..., Any] | None
    """Import reference to an async function that plays each trajectory in place of taking turns with the environment (docs/extending.md)."""
    control: ControlTable
    """Which groups are trained on, how many are under way, and how old a trained token may be."""
    control__max_staleness: int
    """Age of the oldest token that may be trained: the number of versions that the policy is newer than the version that sampled the token. 0: a rollout ends before its update begins; 1: one rollout is sampled while another is trained on; n: n rollouts are sampled meanwhile."""
    control__overlap: bool | None
    """Play groups while the trainer computes, so that weights change under them; unset: with max_staleness above 0. It needs an engine with its own copy of the weights."""
    control__partial: bool
    """Without overlap: keep the unfinished groups of a full rollout with their sampled tokens, and continue them under the next version, instead of aborting them. Their older tokens train within max_staleness."""
    control__too_old: Literal["mask", "drop", "drop_group"]
    """Treatment of a token older than max_staleness. mask: only this token is not trained; drop: its whole sample is not; drop_group: no sample of its task's group is."""
    control__max_partial_age: int | None
    """Restart an unfinished group that was started more than this many versions ago; none: never."""
    control__over_sample: float
    """Without overlap: number of groups that are played for each group still missing. The surplus is aborted when the rollout is full, and its tasks come first in the next rollout."""
    control__max_groups: int | None
    """Groups played at a time, at most; none: no limit."""
    control__filters: Sequence[FilterTable]
    """Rules by which finished groups are dropped; others are played in their place (dynamic sampling)."""
    control__refill: bool
    """Play further groups in place of those that filters drop. false (without overlap): play over_sample times as many groups as needed and no more; if too few of them pass, the first dropped ones (by the start of their play) are trained on all the same."""
    control__give_up_after: int
    """Stop after this many times prompts_per_rollout groups were dropped in a row."""
    control__order: str | Callable[..., Any] | None
    """Order in which finished groups are trained on: an import reference to a function that sorts them; none: by the start of their play."""
    control__retries: int
    """Number of times that a trajectory is played again, with the same seed, if its engine, environment or reward failed or was too slow. Not with deterministic=true."""
    control__retry_budget: int | None
    """Retries in all between two updates; none: any number."""
    control__rollout: str | Callable[..., Any] | None
    """Import reference to an async function `(ask) -> groups`, or to a class of such, that plays whole rollouts in place of whet's scheduler (docs/extending.md). Of the settings of this table, only max_staleness, overlap and too_old then count."""
    control__max_error_rate: float
    """Stop when a greater share of the last trajectories failed; 1: never. A rollout in which every trajectory failed always stops the run."""
    control__error_window: int
    """Number of last trajectories over which max_error_rate is counted. At least a rollout's worth is counted, so that a few failures in a small rollout stop nothing."""
    env: EnvTable
    """The environment: single turn, tools, or your own."""
    env__name: str | Callable[..., Any]
    """A built-in (docs/environments.md) or an import reference to a class or function that makes an environment."""
    env__options: Mapping[str, Any]
    """Keyword arguments of the environment: of an import reference, or of a built-in that has options."""
    env__tools: Sequence[str | Callable[..., Any] | Mapping[str, Any]]
    """For tools: built-in names (docs/mcp.md) and import references to typed functions with a docstring. A table has the `name` of a factory of tools, and its keyword arguments."""
    env__tool_timeout_s: float | None
    """Seconds that one tool call may take; a call over it makes the trajectory a timeout. none: any time."""
    env__max_calls_per_turn: int
    """Tool calls of one turn that are run; further ones are answered with an error."""
    env__max_reply_chars: int
    """Longer replies lose a part: those of tools, of a simulated user, and of other players in a game."""
    env__reply_cut: Literal["head", "middle", "tail"]
    """Part that they lose: the head, the middle or the tail."""
    env__sandbox: SandboxTable
    """The place of the tools python, shell and files, of programs, and of servers that are to run in it (docs/sandbox.md)."""
    env__sandbox__kind: Literal["local", "docker", "fusion"]
    """local: processes of this machine, isolated as its kernel allows; docker: a container for each trajectory; fusion: a server of SandboxFusion's protocol."""
    env__sandbox__at: str
    """The image of docker's containers, which has python and sh (`python:3.12-slim`); or the address of the server (`http://HOST:8080`)."""
    env__sandbox__unsafe: bool
    """Run without isolation where this machine allows none. What the model writes can then do all that you can."""
    env__sandbox__timeout_s: float
    """Seconds after which a call is ended, which its answer says; less than `env.tool_timeout_s`."""
    env__sandbox__memory_mb: int
    """Memory of all processes of a call, in MiB."""
    env__sandbox__max_processes: int
    """Processes and threads of a call."""
    env__sandbox__disk_mb: int
    """Size of a trajectory's folder, in MiB. Where there are namespaces it is in memory."""
    env__sandbox__paths: Sequence[str]
    """Further files and folders of this machine that programs may read, by their full paths."""
    env__parser: str | Callable[..., Any]
    """Format of the model's tool calls. auto: as its chat template tells; hermes, qwen_xml, llama3, deepseek_v3, deepseek_v31, dsml, glm, kimi, harmony, tags, none (docs/tool_formats.md), or an import reference to a function."""
    reward__name: str | Callable[..., Any] | None
    """A built-in (docs/rewards.md lists them) or an import reference to a function (`module:function`, `file.py:function`)."""
    reward__options: Mapping[str, Any]
    """Keyword arguments of the reward `name`."""
    reward__components: Mapping[str, ComponentTable]
    """Several rewards by a name of your choice; the total is their weighted sum."""
    reward__group: GroupRewardTable | None
    """A reward of all siblings of a task together, computed after each has ended and was scored by itself; it replaces their rewards. If it fails, all siblings have failed, and they are not played again (control.retries)."""
    reward__group__name: str | Callable[..., Any]
    """Import reference to a function `(trajectories, **options) -> list`: one score for each of those that ended well (docs/extending.md)."""
    reward__group__options: Mapping[str, Any]
    """Keyword arguments of the function."""
    reward__score_key: str | None
    """Key of the reward if a function returns a mapping; its other numbers are components. Unset: `total`, or the sum."""
    reward__timeout_s: float
    """Seconds for each call, counted from its start in a worker, and for each request of a reward that asks a server."""
    reward__workers: int | None
    """Processes that run plain functions and symbolic comparisons. Unset: one for each core, up to 8."""
    reward__worker_memory_mb: int
    """Address space of each worker, on Linux; 0: no limit. A function that imports torch needs more."""
    reward__environment: Sequence[str]
    """Names of environment variables that workers get, such as the key of a service that a function asks. They get none of the trainer's but those of paths, languages and numerical libraries."""
    algo__name: Literal["grpo"] | Literal["dr_grpo"] | Literal["gspo"] | Literal["cispo"] | Literal["sapo"] | Literal["gmpo"] | Literal["grpo_passk"] | Literal["rloo"] | Literal["opo"] | Literal["gpg"] | Literal["maxrl"] | Literal["otb"] | Literal["remax"] | Literal["reinforce_plus_plus"] | Literal["reinforce_plus_plus_baseline"] | Literal["ppo"] | str | Callable[..., Any]
    """Which algorithm: a built-in one, or an import reference `module:factory` called with (options, plan)."""
    algo__clip_low: float
    """The ratio is clipped from below at 1 - clip_low."""
    algo__clip_high: float
    """The ratio is clipped from above at 1 + clip_high (0.28 is DAPO's clip-higher)."""
    algo__clip_dual: float | None
    """Dual clip: the term of a token with negative advantage is at most clip_dual * |advantage|."""
    algo__reducer: Literal["token_mean", "sample_mean", "group_mean", "token_sum_mean", "sequence_mean", "sequence_sum"] | Literal["constant", "constant_length"]
    """Weights of tokens in the loss. sample_mean: every trajectory counts the same; token_mean: every token does; group_mean: every group does; token_sum_mean: sums over tokens, mean over trajectories; sequence_mean, sequence_sum: the same two over samples; constant_length, constant: sums over reducer_scale."""
    algo__reducer_scale: float | None
    """Divisor of constant_length and constant; unset: the token limit of a trajectory, if it is known."""
    algo__entropy_coef: float
    """Weight of the entropy bonus."""
    algo__kl_coef: float
    """Weight of KL(policy || reference) in the loss."""
    algo__kl_estimator: Literal["k1", "k2", "k3", "low_var", "abs"]
    """Estimator of the KL from the sampled tokens."""
    algo__kl_unbiased: bool
    """Multiply the estimate by pi / pi_old, gradient too: then the tokens that the old policy sampled give no bias."""
    algo__reference: bool | None
    """Keep a frozen copy of the first policy. Unset: only if a KL has a weight; true observes the KL at 0 too."""
    algo__old_logprobs: Literal["auto", "recompute", "rollout", "current"]
    """Denominator of the ratio. recompute: the trainer's log-probs before the first step; rollout: the engine's; current: the present ones, detached (correct only if a rollout feeds one step, and nothing needs them before it, as correction does); auto: current if that is correct, else recompute."""
    algo__loss: LossTable
    """The policy loss."""
    algo__loss__name: str | Callable[..., Any]
    """Policy loss: clip, sequence (GSPO), cispo, sapo, reinforce, geometric_mean (GMPO), clip_cov, kl_cov, or an import reference `module:function` called with (batch, logprobs, old_logprobs, options) that returns core.losses.ClipTerms."""
    algo__loss__sequence_gradient: Literal["token", "sequence"]
    """sequence: path of the gradient of a sample's ratio: token (verl's form) or sequence (slime's)."""
    algo__loss__tau_positive: float
    """sapo: steepness of the gate for positive advantages."""
    algo__loss__tau_negative: float
    """sapo: steepness of the gate for negative advantages."""
    algo__loss__covariance_share: float
    """clip_cov, kl_cov: share of the step's tokens that is held back."""
    algo__loss__covariance_bounds: Sequence[float]
    """clip_cov: range of covariance from which tokens are chosen."""
    algo__loss__covariance_kl_coef: float
    """kl_cov: weight of |log ratio| for the chosen tokens."""
    algo__loss__options: Mapping[str, Any]
    """Options of a loss of your own."""
    algo__whiten: bool
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""
    algo__kl_reward: RewardKLTable
    """KL in the reward."""
    algo__kl_reward__coef: float
    """Each trained token's reward is lowered by coef times its KL."""
    algo__kl_reward__estimator: Literal["k1", "k2", "k3", "low_var", "abs"]
    """Estimator of the KL from the sampled tokens."""
    algo__kl_reward__target: float | None
    """Adapt the coefficient so that the KL of a trajectory's mean token stays near this; unset: a fixed coefficient."""
    algo__kl_reward__horizon: int
    """Trajectories over which a deviation of 20% changes the coefficient by 20%."""
    algo__distill_coef: float
    """On-policy distillation: distill_coef * log pi / pi_teacher of its token is subtracted from every advantage."""
    algo__mask_delta: float | None
    """Off-policy sequence masking: drop tokens with a negative advantage from samples whose mean log pi_old / pi exceeds this (slime's opsm_delta is 1e-4)."""
    algo__correction: CorrectionTable
    """Off-policy correction between engine and trainer."""
    algo__correction__preset: Literal["disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis"] | None
    """One of verl's named presets; settings given here override it."""
    algo__correction__weights: Literal["token", "sequence", "geometric"] | None
    """Level of the ratio that weighs a token: the token's own (token), the product over its sample (sequence), or the geometric mean over its sample (geometric); unset: no weights."""
    algo__correction__bound: Literal["truncate", "clip", "icepop", "mask"]
    """Treatment of ratios outside [low, high]. truncate: at most high; clip: into the bounds; icepop: weight 0; mask: rejected."""
    algo__correction__high: float
    """Upper bound of a weight."""
    algo__correction__low: float | None
    """Lower bound; unset: 1 / high."""
    algo__correction__normalize: bool
    """Divide weights by their mean over the step's trained tokens (which with rejected=mask are the kept ones)."""
    algo__correction__reject: Sequence[RejectionTable]
    """Rules of rejection. A token trains if every rule keeps it."""
    algo__correction__veto: float | None
    """Reject every token of a sample in which some token's ratio pi_train / pi_rollout is below this."""
    algo__correction__rejected: Literal["weigh", "mask"]
    """weigh: a rejected token has weight 0 and still counts in denominators (slime); mask: it is masked before credit is assigned, as if it had not been sampled (verl)."""
    algo__normalize_std: bool
    """Divide the advantage by the group's standard deviation; false is Dr.GRPO's choice."""
    algo__align: Literal["action", "position"]
    """Tokens that count as the same step in two trajectories. action: their n-th trained token; position: their n-th token after the prompt, trained or not."""
    algo__zero_tail: bool
    """No baseline where only the longest trajectory of a group goes on: it would be that one's own return."""
    algo__gamma: float
    """Discount of a time step."""
    algo__credit_over: Literal["actions", "all", "turns"] | Literal["actions", "all"]
    """actions: trained tokens are the time steps; all: so are the environment's (slime); turns: each turn is credited by itself, so only the last one sees the final reward (verl)."""
    algo__lam: float
    """Weight of longer returns: 0 trusts the critic alone, 1 the rewards alone."""
    algo__reward_at: Literal["last_action", "last_token"]
    """Token that receives a trajectory's reward: its last trained token, or its last token of any origin (slime). The latter must be a time step: credit_over=all."""
    algo__bootstrap_truncated: bool
    """Continue the return of a truncated trajectory with the critic's value after its last token (truncated: a token or turn limit cut it). false: nothing follows, as in slime and verl."""
    algo__value_clip: float | None
    """The critic's prediction is held within this of its old one (slime 0.2, verl 0.5); unset: no clip."""
    algo__options: Mapping[str, Any]
    """Handed to an algorithm of your own."""
    critic: CriticTable | None
    """The critic, for `ppo`; unset: one with default settings."""
    critic__path: str | None
    """A folder or a name on the hub: a language model, whose scores then begin at 0, or a reward model, whose head is kept. Unset: the policy's model."""
    critic__optim: CriticOptimTable
    """The critic's own optimizer."""
    critic__optim__name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    critic__optim__lr: float
    """Peak learning rate."""
    critic__optim__betas: Sequence[float]
    """Decay of the two moments."""
    critic__optim__eps: float
    """Added to the root of the second moment."""
    critic__optim__momentum: float
    """Momentum of muon."""
    critic__optim__weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    critic__optim__clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    critic__optim__schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    critic__optim__warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    critic__optim__min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""
    critic__parallel: ParallelTable | None
    """Layout of the critic over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""
    critic__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    critic__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    critic__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    critic__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    critic__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    critic__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    critic__warmup_rollouts: int
    """Number of rollouts at the start in which only the critic learns, and the policy stays unchanged."""
    reference: ReferenceTable | None
    """The reference, where the algorithm keeps one; unset: the policy's first weights."""
    reference__path: str | None
    """A folder or a name on the hub; unset: the policy's first weights, also where `checkpoint.restore` gave them. Of a policy that is an adapter: its base."""
    reference__refresh_every: int | None
    """Rollouts after which the reference becomes a copy of the policy, each time; unset: the reference never changes."""
    reference__offload: bool
    """Keep its weights in the CPU's memory, and on the device only while its log-probs are computed; on a mesh, one layer after another."""
    reference__parallel: ParallelTable | None
    """Layout of the reference over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""
    reference__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    reference__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    reference__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    reference__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    reference__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    reference__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    teacher: TeacherTable | None
    """The teacher, for distillation."""
    teacher__path: str
    """A folder or a name on the hub; its tokenizer must be the policy's. With `urls` nothing else of it is read."""
    teacher__urls: Sequence[str]
    """Servers that run already with this model (`http://HOST:PORT`, of vLLM, SGLang or `whet serve`) and compute its log-probs; their key is read from WHET_ENGINE_KEY. Empty: the trainer's processes compute them."""
    teacher__timeout_s: float
    """Seconds that a server may take for the log-probs of a sample."""
    teacher__parallel: ParallelTable | None
    """Layout of the teacher over the job's processes. It must use as many of them as `train.parallel` does; unset: the policy's layout."""
    teacher__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    teacher__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    teacher__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    teacher__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    teacher__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    teacher__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    engine: EngineTable
    """Sampling engine."""
    engine__name: Literal["embedded", "vllm", "sglang"]
    """Engine that samples: embedded, which is whet's own, or vllm or sglang, whose servers have environments of their own (docs/engines.md)."""
    engine__urls: Sequence[str]
    """Servers that run already (`http://HOST:PORT`); their key is read from the environment variable WHET_ENGINE_KEY. Empty: whet starts them."""
    engine__router: str | None
    """Address of a router before the servers of `urls`: it chooses who samples, and weights go to each server."""
    engine__servers: int
    """Servers that whet starts: on this machine, or, with cluster.backend=ray, on the nodes that Ray places them on."""
    engine__python: str
    """Python of the environment that has the servers: vLLM and whet-vllm, or SGLang."""
    engine__quantization: str | None
    """Format of the servers' weights, which are quantized from the trainer's as they are written: fp8 (blocks of 128 x 128), int4 (groups of 128, or 64 or 32), or a quantized checkpoint (folder or hub name), whose format is taken and with which servers start. Unset: the trainer's type."""
    engine__vllm: VllmTable
    """Servers of vLLM."""
    engine__vllm__args: Mapping[str, Any]
    """Arguments of the servers by vLLM's own names, with underscores (`{tensor_parallel_size = 2}`); true: a switch. whet sets `model`, `host`, `port`, and what log-probs and weights need."""
    engine__sglang: SglangTable
    """Servers of SGLang."""
    engine__sglang__args: Mapping[str, Any]
    """Arguments of the servers by SGLang's own names, with underscores (`{tp_size = 2}`); true: a switch. whet sets `model_path`, `host`, `port`, and how replies are streamed."""
    engine__embedded: EmbeddedTable
    """The engine in the trainer's process."""
    engine__embedded__cache_tokens: int | None
    """Tokens that the KV cache holds, over all sequences. Unset: as many as the sequences that run together may have, within a fifth of the device's memory."""
    engine__embedded__block_size: int
    """Tokens per cache block."""
    engine__embedded__max_running: int
    """Sequences that run at a time; more wait."""
    engine__embedded__max_batch_tokens: int
    """Tokens that one step computes at most: long prompts are prefilled in chunks, mixed with decoding."""
    engine__embedded__compiled: bool
    """Decode on CPUs with code that is compiled on first use (by the installed C compiler, in about a second): Llama, Mistral, Qwen2 and Qwen3 in float32. Other models, and machines without a compiler, decode with torch, and a warning says why."""
    engine__embedded__static_decode: bool
    """Decode in steps of fixed shapes, padded to powers of two. On CUDA each is captured as a graph and replayed; that was never run on a GPU, so compare before you rely on it. On a CPU the same steps are computed, slower than others."""
    engine__embedded__own_weights: bool
    """Keep a copy of the weights in memory of the engine's own, brought up to date at every version; false: read the trainer's."""
    engine__embedded__copies: int
    """Copies of the engine. 1: it runs in the trainer's process; more: each copy runs in a process of its own with the sizes above, and all share one copy of the weights in shared memory."""
    engine__embedded__tensor_parallel: int
    """Processes of each copy: the model's layers are cut over them by the model's own plan, the cache by its heads of keys and values; they decode with torch. 1: a copy is one process."""
    engine__embedded__copy_devices: Sequence[str]
    """Device of each copy, or of each of its processes (`cuda:1`; each then has its own weights there). Empty: the CPU for all, or, if the model is on a GPU, one GPU after the other."""
    engine__pool: PoolTable
    """Restarts, health checks and deadlines of the engine's processes, if it has its own."""
    engine__pool__restarts: int
    """Restarts of each member after it died or hung, or failed to restart. Ten minutes of service set the count back to 0. After the last restart the member is given up, and the others continue. 0: never restart. With `deterministic` a lost member ends the run."""
    engine__pool__start_timeout_s: float
    """Seconds for a member to start: to import torch, to attach to the weights and, if it has its own device, to move them there."""
    engine__pool__health_timeout_s: float
    """Seconds for a member to answer a health check, a call that computes nothing. After that the member counts as hung: it is killed and restarted."""
    engine__pool__step_timeout_s: float
    """Seconds that one step of a member, or one score, may take. After that the member counts as hung, even if it still answers health checks."""
    engine__pool__update_timeout_s: float
    """Seconds for a member to take over new weights. After that the member counts as hung; the version rests on the receipts of the others, and the member serves again once it holds the same weights. A shorter `sync.timeout_s` ends the run instead. If all members take part in one exchange (`sync.transport=broadcast`), the shorter of the two ends the run."""
    engine__sleep: bool | None
    """Free the memory of the engine's caches, and of its own copy of the weights, while the trainer computes; new weights wake the engine. Unset: only if the engine has its own processes on the trainer's GPUs and sampling does not overlap training."""
    sync: SyncTable
    """Transfer of new weights to engines in processes of their own."""
    sync__transport: Literal["auto", "shared", "ipc", "broadcast", "disk", "delta"]
    """Transport of weights. shared: one file in the machine's memory, which all engines map; ipc: memory of the trainer's device that engines on the same machine open; broadcast: a process group (gloo; to SGLang's servers NCCL on GPUs); disk: a folder in Hugging Face format for each version; delta: only the changes since the version before, compressed; auto: shared."""
    sync__timeout_s: float
    """Seconds that an engine may take over a version before the run stops. By broadcast and ipc they bound each of these waits: for the engine to arrive, for a message, and, once everything is sent, for the engine's answer."""
    sync__max_buffer_bytes: int
    """Size in bytes. ipc and broadcast: weights in flight at a time, in addition to the tensor being gathered; disk: a file of weights."""
    sync__folder: str | None
    """disk and delta: folder of the versions, on a file system that trainer and engines share; unset: `sync` in the run's folder."""
    evaluate: EvaluateTable
    """Evaluation sets."""
    evaluate__interval: int | None
    """Rollouts between two evaluations; unset: evaluate only at the end."""
    evaluate__before_training: bool
    """Also before the first rollout."""
    evaluate__sets: Mapping[str, EvaluationSetTable]
    """The sets, by name."""

class SftSettings(TypedDict, total=False):
    run_dir: str
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model. If the command line's file does not name it, it is runs/FILE-TIME, and an unfinished run of the file with the same settings is continued."""
    seed: int
    """Seed of everything random: data order, sampling, shuffles."""
    deterministic: bool
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on the duration of tool calls."""
    threads: int | None
    """CPU threads for torch; unset: torch's choice."""
    model__path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    model__dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Type of parameters and computation. With bfloat16 and float16 the optimizer keeps float32 master weights; with float16 the loss is scaled, too, and a step whose gradients overflow is computed again."""
    model__config: Mapping[str, Any]
    """Values in place of those in the model's config.json, such as `{max_position_embeddings = 32768}` for longer sequences, or its rotary scaling. A trained model keeps them."""
    model__device: str
    """auto picks cuda, then mps, then cpu."""
    model__trust_remote_code: bool
    """Allow code that comes with the model to run."""
    model__gradient_checkpointing: bool | Literal["selective"]
    """Recompute each layer's activations in the backward pass: least memory, about a third more compute; selective: keep the results of matrix products and attention, and recompute the rest, for a few per cent."""
    model__gradient_checkpointing_every: int
    """Recompute one of this many layers; the others keep all their activations."""
    train: TrainTable
    """Optimizer and token budget."""
    train__optim: OptimTable
    """The optimizer and its schedule."""
    train__optim__name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    train__optim__lr: float
    """Peak learning rate."""
    train__optim__betas: Sequence[float]
    """Decay of the two moments."""
    train__optim__eps: float
    """Added to the root of the second moment."""
    train__optim__momentum: float
    """Momentum of muon."""
    train__optim__weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    train__optim__clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    train__optim__schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    train__optim__warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    train__optim__min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""
    train__offload: bool
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there. The device then holds one copy of the weights, and every step waits for the transfer both ways."""
    train__max_tokens_per_device: int
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are computed once. A longer sample gets its own row."""
    train__rows: Literal["auto", "forest", "chains"]
    """Computation of shared beginnings. forest: the common beginning of samples is computed once, forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of tokens that was saved."""
    train__lora: LoraTable | None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    train__lora__rank: int
    """Rows of A, columns of B."""
    train__lora__alpha: float
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    train__lora__target_modules: Literal["all-linear"] | Sequence[str]
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj, up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example ["q_proj", "v_proj"]."""
    train__lora__rslora: bool
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    train__lora__init: Literal["kaiming", "gaussian"]
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    train__lora__export_merged: bool
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged into its weights to `<run_dir>/merged`."""
    train__freeze: Sequence[str]
    """Parameters that do not train, by their names in the model's files: `*` is any text, and with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train; ["*", "!*.layers.27.*"]: one layer does."""
    train__parallel: ParallelTable | Literal["auto"] | None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices' memory the one whose exchanges take the least time, printed when the run begins."""
    train__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    train__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    train__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    train__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    train__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    train__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    train__exchange_timeout_s: float
    """Seconds that a process waits for the others in an exchange, before the run ends and names the missing ones. It must cover the largest difference in computing time between two exchanges."""
    train__compile: bool
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    train__routing_replay: Literal["off", "old", "rollout"]
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their gradient."""
    train__logprob_chunk_tokens: int | None
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""
    observe: ObserveTable
    """Display, trackers and records."""
    observe__trackers: Sequence[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"] | str | Callable[..., Any]]
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    observe__prometheus: str | None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    observe__show: int
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    observe__display: Literal["auto", "rich", "plain", "none"]
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    observe__on_rollout: str | Callable[..., Any] | None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every rollout after its update and may return further metrics, by name (docs/extending.md)."""
    observe__records: RecordsTable
    """Records of every token."""
    observe__records__every: int
    """Record every n-th rollout; 0 never does."""
    observe__records__trajectories: int | None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row. Unset: all."""
    observe__records__keep: int | None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""
    observe__peak_tflops: float | None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs whose sheet whet does not know, there is no `train/mfu`."""
    checkpoint: CheckpointTable
    """When to save."""
    checkpoint__interval: int | None
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the end. none: only at the end."""
    checkpoint__keep: int
    """Checkpoints that stay on disk; older ones are removed."""
    checkpoint__best: str | None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new best saves at once."""
    checkpoint__best_mode: Literal["max", "min"]
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    checkpoint__resume: bool | Literal["fresh"]
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder; fresh: rename the folder, and begin again from the start."""
    checkpoint__async_save: bool
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save waits for the one before."""
    checkpoint__restore: RestoreTable | None
    """Checkpoint that a run without its own checkpoint starts from."""
    checkpoint__restore__path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    checkpoint__restore__parts: Sequence[Literal["weights", "optimizer", "data", "random", "counters"]]
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the schedule); data (the cursor); random (generators' states); counters. With all of them the run continues exactly as the other would have."""
    cluster: ClusterTable
    """Placement of the run's processes."""
    cluster__backend: Literal["local", "ray"]
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used unchanged."""
    cluster__layout: Literal["colocate", "disaggregate", "async"]
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the engine's processes have their own devices, and take turns with the trainer; async: they have their own devices, and sample while the trainer computes, within control.max_staleness."""
    cluster__address: str | None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on this machine for this run."""
    cluster__trainer_cpus: float
    """Processors that Ray sets apart for each process of the trainer."""
    cluster__trainer_gpus: float | None
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an engine's process is colocated, each of the two gets half of the larger number."""
    cluster__engine_cpus: float
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or a layout with separate devices), and for each server."""
    cluster__engine_gpus: float | None
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or as many as the server's arguments ask for."""
    cluster__private_network: bool
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang) may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    cluster__start_timeout_s: float
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""
    data__template: str | None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    data__template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as enable_thinking."""
    data__special_tokens_in_text: bool
    """Turn special tokens spelled in a text (of a data row, a user, a tool or its schema) into real ones, as if the template had written them; false: they stay text, and are counted."""
    data__path: Any
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    data__messages_key: str | None
    """Column of a conversation: a list of OpenAI messages. Every message of an assistant trains, except with `step_loss_mask` 0."""
    data__prompt_key: str | None
    """Instead of messages_key, with response_key: column of the prompt, text or a list of OpenAI messages."""
    data__response_key: str | None
    """Column of the reply to the prompt: text. It trains."""
    data__tools_key: str | None
    """Column of the tools that the row's assistant may call: a list of OpenAI schemas or a JSON string of one."""
    data__mask: Literal["delta", "qwen", "qwen3", "qwen3_5", "distill_qwen"]
    """Application of the chat template, and choice of the tokens that train. delta: as in a rollout with the same messages; qwen, qwen3, qwen3_5, distill_qwen: as in slime under these names, to match its runs."""
    data__max_tokens: int | None
    """Drop the conversations with more tokens (they are counted)."""
    data__shuffle: bool
    """A new order in every epoch; false: the order of the files."""
    data__seed: int | None
    """Seed of the shuffles; unset: the run's seed."""
    num_steps: int | None
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None
    """Passes over the conversations."""
    samples_per_step: int
    """Conversations that one optimizer step learns from."""
    reducer: Literal["token_mean", "sample_mean", "group_mean", "token_sum_mean", "sequence_mean", "sequence_sum"]
    """token_mean: every trained token counts the same; sample_mean: every conversation does."""
    evaluate: HeldOutTable
    """Held-out conversations; their loss is `eval/sft/loss`."""
    evaluate__path: Any
    """File, folder or hub data set, with the columns of `[data]`; unset: nothing is held out."""
    evaluate__interval: int | None
    """Steps between two evaluations; another one follows at the end. none: only at the end."""
    evaluate__before_training: bool
    """Also before the first step."""

class DpoSettings(TypedDict, total=False):
    run_dir: str
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model. If the command line's file does not name it, it is runs/FILE-TIME, and an unfinished run of the file with the same settings is continued."""
    seed: int
    """Seed of everything random: data order, sampling, shuffles."""
    deterministic: bool
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on the duration of tool calls."""
    threads: int | None
    """CPU threads for torch; unset: torch's choice."""
    model__path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    model__dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Type of parameters and computation. With bfloat16 and float16 the optimizer keeps float32 master weights; with float16 the loss is scaled, too, and a step whose gradients overflow is computed again."""
    model__config: Mapping[str, Any]
    """Values in place of those in the model's config.json, such as `{max_position_embeddings = 32768}` for longer sequences, or its rotary scaling. A trained model keeps them."""
    model__device: str
    """auto picks cuda, then mps, then cpu."""
    model__trust_remote_code: bool
    """Allow code that comes with the model to run."""
    model__gradient_checkpointing: bool | Literal["selective"]
    """Recompute each layer's activations in the backward pass: least memory, about a third more compute; selective: keep the results of matrix products and attention, and recompute the rest, for a few per cent."""
    model__gradient_checkpointing_every: int
    """Recompute one of this many layers; the others keep all their activations."""
    train: TrainTable
    """Optimizer and token budget."""
    train__optim: OptimTable
    """The optimizer and its schedule."""
    train__optim__name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    train__optim__lr: float
    """Peak learning rate."""
    train__optim__betas: Sequence[float]
    """Decay of the two moments."""
    train__optim__eps: float
    """Added to the root of the second moment."""
    train__optim__momentum: float
    """Momentum of muon."""
    train__optim__weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    train__optim__clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    train__optim__schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    train__optim__warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    train__optim__min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""
    train__offload: bool
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there. The device then holds one copy of the weights, and every step waits for the transfer both ways."""
    train__max_tokens_per_device: int
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are computed once. A longer sample gets its own row."""
    train__rows: Literal["auto", "forest", "chains"]
    """Computation of shared beginnings. forest: the common beginning of samples is computed once, forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of tokens that was saved."""
    train__lora: LoraTable | None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    train__lora__rank: int
    """Rows of A, columns of B."""
    train__lora__alpha: float
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    train__lora__target_modules: Literal["all-linear"] | Sequence[str]
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj, up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example ["q_proj", "v_proj"]."""
    train__lora__rslora: bool
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    train__lora__init: Literal["kaiming", "gaussian"]
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    train__lora__export_merged: bool
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged into its weights to `<run_dir>/merged`."""
    train__freeze: Sequence[str]
    """Parameters that do not train, by their names in the model's files: `*` is any text, and with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train; ["*", "!*.layers.27.*"]: one layer does."""
    train__parallel: ParallelTable | Literal["auto"] | None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices' memory the one whose exchanges take the least time, printed when the run begins."""
    train__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    train__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    train__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    train__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    train__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    train__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    train__exchange_timeout_s: float
    """Seconds that a process waits for the others in an exchange, before the run ends and names the missing ones. It must cover the largest difference in computing time between two exchanges."""
    train__compile: bool
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    train__routing_replay: Literal["off", "old", "rollout"]
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their gradient."""
    train__logprob_chunk_tokens: int | None
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""
    observe: ObserveTable
    """Display, trackers and records."""
    observe__trackers: Sequence[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"] | str | Callable[..., Any]]
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    observe__prometheus: str | None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    observe__show: int
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    observe__display: Literal["auto", "rich", "plain", "none"]
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    observe__on_rollout: str | Callable[..., Any] | None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every rollout after its update and may return further metrics, by name (docs/extending.md)."""
    observe__records: RecordsTable
    """Records of every token."""
    observe__records__every: int
    """Record every n-th rollout; 0 never does."""
    observe__records__trajectories: int | None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row. Unset: all."""
    observe__records__keep: int | None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""
    observe__peak_tflops: float | None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs whose sheet whet does not know, there is no `train/mfu`."""
    checkpoint: CheckpointTable
    """When to save."""
    checkpoint__interval: int | None
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the end. none: only at the end."""
    checkpoint__keep: int
    """Checkpoints that stay on disk; older ones are removed."""
    checkpoint__best: str | None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new best saves at once."""
    checkpoint__best_mode: Literal["max", "min"]
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    checkpoint__resume: bool | Literal["fresh"]
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder; fresh: rename the folder, and begin again from the start."""
    checkpoint__async_save: bool
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save waits for the one before."""
    checkpoint__restore: RestoreTable | None
    """Checkpoint that a run without its own checkpoint starts from."""
    checkpoint__restore__path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    checkpoint__restore__parts: Sequence[Literal["weights", "optimizer", "data", "random", "counters"]]
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the schedule); data (the cursor); random (generators' states); counters. With all of them the run continues exactly as the other would have."""
    cluster: ClusterTable
    """Placement of the run's processes."""
    cluster__backend: Literal["local", "ray"]
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used unchanged."""
    cluster__layout: Literal["colocate", "disaggregate", "async"]
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the engine's processes have their own devices, and take turns with the trainer; async: they have their own devices, and sample while the trainer computes, within control.max_staleness."""
    cluster__address: str | None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on this machine for this run."""
    cluster__trainer_cpus: float
    """Processors that Ray sets apart for each process of the trainer."""
    cluster__trainer_gpus: float | None
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an engine's process is colocated, each of the two gets half of the larger number."""
    cluster__engine_cpus: float
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or a layout with separate devices), and for each server."""
    cluster__engine_gpus: float | None
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or as many as the server's arguments ask for."""
    cluster__private_network: bool
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang) may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    cluster__start_timeout_s: float
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""
    data__template: str | None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    data__template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as enable_thinking."""
    data__special_tokens_in_text: bool
    """Turn special tokens spelled in a text (of a data row, a user, a tool or its schema) into real ones, as if the template had written them; false: they stay text, and are counted."""
    data__prompt_key: str | None
    """Column of the prompt, text or a list of OpenAI messages; unset: chosen and rejected are whole conversations, and what they begin with alike is the prompt."""
    data__chosen_key: str
    """Column of the preferred reply: a list of OpenAI messages or, with prompt_key, text. What its assistant says after the prompt trains."""
    data__rejected_key: str
    """Column of the other reply, in the same form."""
    data__margin_key: str | None
    """Column of a number by how much the chosen reply is to win; unset: 0 for all. `dpo.loss = "ipo"` has none."""
    data__tools_key: str | None
    """Column of the tools that the row's assistant may call: a list of OpenAI schemas or a JSON string of one."""
    data__mask: Literal["delta", "qwen", "qwen3", "qwen3_5", "distill_qwen"]
    """Application of the chat template, and choice of the tokens that train, as for `whet sft`."""
    data__max_tokens: int | None
    """Drop the pairs with a longer conversation (they are counted)."""
    data__path: Any
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    data__shuffle: bool
    """A new order in every epoch; false: the order of the files."""
    data__seed: int | None
    """Seed of the shuffles; unset: the run's seed."""
    num_steps: int | None
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None
    """Passes over the pairs."""
    pairs_per_step: int
    """Pairs that one optimizer step learns from."""
    evaluate: HeldOutTable
    """Held-out pairs."""
    evaluate__path: Any
    """File, folder or hub data set, with the columns of `[data]`; unset: nothing is held out."""
    evaluate__interval: int | None
    """Steps between two evaluations; another one follows at the end. none: only at the end."""
    evaluate__before_training: bool
    """Also before the first step."""
    dpo: DpoTable
    """The loss."""
    dpo__loss: Literal["sigmoid", "ipo"]
    """sigmoid: -log sigmoid(beta h - margin) (DPO); ipo: (h - 1/(2 beta))^2 (IPO, arXiv 2310.12036)."""
    dpo__beta: float
    """Strength of the pull towards the reference: the larger, the closer the policy stays to it."""
    dpo__label_smoothing: float
    """Share of pairs that are taken to be labelled the wrong way round (conservative DPO); sigmoid only."""
    dpo__length_normalize: bool | None
    """Log-ratios as means over a reply's trained tokens instead of sums; unset: means for ipo, sums for sigmoid."""
    dpo__sft_coef: float
    """Weight of the chosen reply's negative log-likelihood per token, on top (RPO, arXiv 2404.19733, which uses 1)."""

class RewardModelSettings(TypedDict, total=False):
    run_dir: str
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model. If the command line's file does not name it, it is runs/FILE-TIME, and an unfinished run of the file with the same settings is continued."""
    seed: int
    """Seed of everything random: data order, sampling, shuffles."""
    deterministic: bool
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on the duration of tool calls."""
    threads: int | None
    """CPU threads for torch; unset: torch's choice."""
    model__path: str
    """A folder in Hugging Face format, or a name on the Hugging Face hub."""
    model__dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Type of parameters and computation. With bfloat16 and float16 the optimizer keeps float32 master weights; with float16 the loss is scaled, too, and a step whose gradients overflow is computed again."""
    model__config: Mapping[str, Any]
    """Values in place of those in the model's config.json, such as `{max_position_embeddings = 32768}` for longer sequences, or its rotary scaling. A trained model keeps them."""
    model__device: str
    """auto picks cuda, then mps, then cpu."""
    model__trust_remote_code: bool
    """Allow code that comes with the model to run."""
    model__gradient_checkpointing: bool | Literal["selective"]
    """Recompute each layer's activations in the backward pass: least memory, about a third more compute; selective: keep the results of matrix products and attention, and recompute the rest, for a few per cent."""
    model__gradient_checkpointing_every: int
    """Recompute one of this many layers; the others keep all their activations."""
    train: TrainTable
    """Optimizer and token budget."""
    train__optim: OptimTable
    """The optimizer and its schedule."""
    train__optim__name: Literal["adamw", "adamw_8bit", "muon"]
    """Optimizer. adamw (arXiv 1711.05101): torch's fused kernels if the device has them; adamw_8bit: matrices with 4096 or more entries on a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), everything else uses adamw; muon: layers' matrices are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, everything else uses adamw."""
    train__optim__lr: float
    """Peak learning rate."""
    train__optim__betas: Sequence[float]
    """Decay of the two moments."""
    train__optim__eps: float
    """Added to the root of the second moment."""
    train__optim__momentum: float
    """Momentum of muon."""
    train__optim__weight_decay: float
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    train__optim__clip_grad: float | None
    """Largest gradient norm; unset: no clipping."""
    train__optim__schedule: Literal["constant", "linear", "cosine"]
    """Decay of the learning rate after the warm-up, over the run's optimizer steps."""
    train__optim__warmup_steps: int
    """Optimizer steps over which the learning rate rises from 0."""
    train__optim__min_lr_ratio: float
    """Final learning rate of linear and cosine, as a share of the peak."""
    train__offload: bool
    """Keep the optimizer (gradients, moments, float32 masters), and on a mesh the sharded parameters, in the CPU's memory, and step there. The device then holds one copy of the weights, and every step waits for the transfer both ways."""
    train__max_tokens_per_device: int
    """Token limit of a row (a micro-batch). Tokens that samples share are counted once if they are computed once. A longer sample gets its own row."""
    train__rows: Literal["auto", "forest", "chains"]
    """Computation of shared beginnings. forest: the common beginning of samples is computed once, forward and backward; chains: every sample is computed whole; auto: forest if it saves a fifth of the tokens. The loss and its gradient are the same. The metric `train/shared` has the share of tokens that was saved."""
    train__lora: LoraTable | None
    """Train a low-rank adapter instead of the weights; unset: the whole model trains."""
    train__lora__rank: int
    """Rows of A, columns of B."""
    train__lora__alpha: float
    """Scale of the adapter: B A is multiplied by alpha divided by the rank."""
    train__lora__target_modules: Literal["all-linear"] | Sequence[str]
    """all-linear: every linear layer but the output, and in a mixture of experts but those that are named like an expert's (gate_proj, up_proj, down_proj), since experts, whose weights are one tensor, have no adapter; or the ends of layers' names, for example ["q_proj", "v_proj"]."""
    train__lora__rslora: bool
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    train__lora__init: Literal["kaiming", "gaussian"]
    """Initial values of A. B begins as 0, so the first policy is the base, bit for bit."""
    train__lora__export_merged: bool
    """In addition to the adapter in `<run_dir>/model`, write the whole model with the adapter merged into its weights to `<run_dir>/merged`."""
    train__freeze: Sequence[str]
    """Parameters that do not train, by their names in the model's files: `*` is any text, and with `!` before it a name trains after all. ["*embed_tokens*"]: all but the embeddings train; ["*", "!*.layers.27.*"]: one layer does."""
    train__parallel: ParallelTable | Literal["auto"] | None
    """Layout of the model over the processes of this job; unset: one process has all of it; auto: of the layouts that fit the devices' memory the one whose exchanges take the least time, printed when the run begins."""
    train__parallel__replicate: int
    """Copies of the sharded model, each with samples of its own (HSDP)."""
    train__parallel__shard: int
    """Ranks with samples of their own, over which parameters, gradients and optimizer are cut (FSDP)."""
    train__parallel__context: int
    """Ranks that share each row of tokens; parameters are cut over them, too."""
    train__parallel__tensor: int
    """Ranks that share each layer's matrices and the vocabulary, by the model's own plan."""
    train__parallel__expert: int
    """Ranks that the experts of a mixture are spread over: a multiple of `tensor` that divides shard x context x tensor."""
    train__parallel__context_attention: Literal["auto"] | Literal["ulysses", "gather"]
    """Attention of ranks that share rows. ulysses: each rank attends with a part of the heads; gather: each rank has all keys and values for its own queries, in chains only; auto: ulysses if the heads divide."""
    train__exchange_timeout_s: float
    """Seconds that a process waits for the others in an exchange, before the run ends and names the missing ones. It must cover the largest difference in computing time between two exchanges."""
    train__compile: bool
    """Compile the decoder's layers (torch.compile) when the first rows come, once for all layers that are alike: `time/compile_s` in `metrics.jsonl` has the seconds. On a mesh without `tensor` and `expert`."""
    train__routing_replay: Literal["off", "old", "rollout"]
    """Experts that a mixture's tokens go to in the trainer. off: its routers choose, in every pass again; old: the choice of the pass that computes old log-probs is kept for the update (R2, arXiv 2507.18071); rollout: the engine's choice holds in both (R3, arXiv 2510.11370). The weights of the chosen experts are the trainer's own, with their gradient."""
    train__logprob_chunk_tokens: int | None
    """Rows of logits held at a time; unset: as many as fit into 256 MiB."""
    observe: ObserveTable
    """Display, trackers and records."""
    observe__trackers: Sequence[Literal["tensorboard", "wandb", "trackio", "swanlab", "mlflow"] | str | Callable[..., Any]]
    """Receivers of metrics and replies besides the run's folder: tensorboard, wandb, trackio, swanlab, mlflow, or an import reference to a callable `(run_dir: Path, config: dict) -> Tracker` (docs/extending.md)."""
    observe__prometheus: str | None
    """Address on this machine (`127.0.0.1:9400`; port 0: a free one) at which GET /metrics answers a Prometheus scrape: the run's newest metrics, the state of the engine's members, and the servers' own metrics. Unset: none."""
    observe__show: int
    """Replies of each rollout and evaluation that are printed with their rewards, from the best to the worst (`--show N`)."""
    observe__display: Literal["auto", "rich", "plain", "none"]
    """`rich`: a live panel; `plain`: a line per step; `none`: warnings only; `auto`: rich on a terminal, else plain."""
    observe__on_rollout: str | Callable[..., Any] | None
    """Import reference to a function `(rollout_id, groups, dropped, metrics)` that is called for every rollout after its update and may return further metrics, by name (docs/extending.md)."""
    observe__records: RecordsTable
    """Records of every token."""
    observe__records__every: int
    """Record every n-th rollout; 0 never does."""
    observe__records__trajectories: int | None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row. Unset: all."""
    observe__records__keep: int | None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""
    observe__peak_tflops: float | None
    """Peak rate of one of the trainer's devices in 1e12 floating-point operations a second, the reference of `train/mfu`. Unset: the GPU's data sheet for bfloat16 or float32; for CPUs, and GPUs whose sheet whet does not know, there is no `train/mfu`."""
    checkpoint: CheckpointTable
    """When to save."""
    checkpoint__interval: int | None
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the end. none: only at the end."""
    checkpoint__keep: int
    """Checkpoints that stay on disk; older ones are removed."""
    checkpoint__best: str | None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new best saves at once."""
    checkpoint__best_mode: Literal["max", "min"]
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    checkpoint__resume: bool | Literal["fresh"]
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder; fresh: rename the folder, and begin again from the start."""
    checkpoint__async_save: bool
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save waits for the one before."""
    checkpoint__restore: RestoreTable | None
    """Checkpoint that a run without its own checkpoint starts from."""
    checkpoint__restore__path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    checkpoint__restore__parts: Sequence[Literal["weights", "optimizer", "data", "random", "counters"]]
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the schedule); data (the cursor); random (generators' states); counters. With all of them the run continues exactly as the other would have."""
    cluster: ClusterTable
    """Placement of the run's processes."""
    cluster__backend: Literal["local", "ray"]
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used unchanged."""
    cluster__layout: Literal["colocate", "disaggregate", "async"]
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the engine's processes have their own devices, and take turns with the trainer; async: they have their own devices, and sample while the trainer computes, within control.max_staleness."""
    cluster__address: str | None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on this machine for this run."""
    cluster__trainer_cpus: float
    """Processors that Ray sets apart for each process of the trainer."""
    cluster__trainer_gpus: float | None
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an engine's process is colocated, each of the two gets half of the larger number."""
    cluster__engine_cpus: float
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or a layout with separate devices), and for each server."""
    cluster__engine_gpus: float | None
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or as many as the server's arguments ask for."""
    cluster__private_network: bool
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang) may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    cluster__start_timeout_s: float
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""
    data__template: str | None
    """A chat template in place of the tokenizer's own: a file, or the template itself (Jinja). A trained model keeps it."""
    data__template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as enable_thinking."""
    data__special_tokens_in_text: bool
    """Turn special tokens spelled in a text (of a data row, a user, a tool or its schema) into real ones, as if the template had written them; false: they stay text, and are counted."""
    data__prompt_key: str | None
    """Column of the prompt, text or a list of OpenAI messages; unset: chosen and rejected are whole conversations, and what they begin with alike is the prompt."""
    data__chosen_key: str
    """Column of the preferred reply: a list of OpenAI messages or, with prompt_key, text. What its assistant says after the prompt trains."""
    data__rejected_key: str
    """Column of the other reply, in the same form."""
    data__margin_key: str | None
    """Column of a number by how much the chosen reply is to win; unset: 0 for all. `dpo.loss = "ipo"` has none."""
    data__tools_key: str | None
    """Column of the tools that the row's assistant may call: a list of OpenAI schemas or a JSON string of one."""
    data__mask: Literal["delta", "qwen", "qwen3", "qwen3_5", "distill_qwen"]
    """Application of the chat template, and choice of the tokens that train, as for `whet sft`."""
    data__max_tokens: int | None
    """Drop the pairs with a longer conversation (they are counted)."""
    data__path: Any
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    data__shuffle: bool
    """A new order in every epoch; false: the order of the files."""
    data__seed: int | None
    """Seed of the shuffles; unset: the run's seed."""
    num_steps: int | None
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None
    """Passes over the pairs."""
    pairs_per_step: int
    """Pairs that one optimizer step learns from."""
    evaluate: HeldOutTable
    """Held-out pairs."""
    evaluate__path: Any
    """File, folder or hub data set, with the columns of `[data]`; unset: nothing is held out."""
    evaluate__interval: int | None
    """Steps between two evaluations; another one follows at the end. none: only at the end."""
    evaluate__before_training: bool
    """Also before the first step."""
    rm: RewardModelTable
    """The loss."""
    rm__center_coef: float
    """Weight of (score(chosen) + score(rejected))^2 on top, which keeps scores around 0 (arXiv 2312.09244, which uses 0.01)."""
