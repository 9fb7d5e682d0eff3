"""`[algo]`: every algorithm's settings, with its own defaults. `name` says which, and a key of another algorithm is refused.

Example:
    [algo]
    name = "grpo"
    clip_high = 0.28
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from whet.algo.policy_config import LossConfig, PolicyConfig
from whet.config import Config, OneOf, Reference
from whet.core.choices import Align, CreditOver, ReducerName, RewardAt, ScaledReducerName


class RelativeConfig(PolicyConfig):
    """Settings of the algorithms that use GRPO's advantage."""

    normalize_std: bool = True
    """Divide the advantage by the group's standard deviation; false is Dr.GRPO's choice."""


class GRPOConfig(RelativeConfig):
    """GRPO, arXiv 2402.03300. Published with kl_coef=0.04. DAPO (arXiv 2503.14476) is clip_high=0.28 with reducer=token_mean."""

    name: Literal["grpo"] = "grpo"
    """Which algorithm: a built-in one, or an import reference `module:factory` called with (options, plan)."""


class DrGRPOConfig(RelativeConfig):
    """Dr.GRPO, arXiv 2503.20783: as published, no division by the group's std or by the reply's length, and no KL."""

    name: Literal["dr_grpo"] = "dr_grpo"
    normalize_std: bool = False
    """Divide the advantage by the group's standard deviation; false is Dr.GRPO's choice."""
    reducer: ReducerName | ScaledReducerName = "constant_length"
    """Weights of the tokens in the loss. constant_length divides the sum over tokens by one number,
    whatever the lengths of the samples."""


class GSPOConfig(RelativeConfig):
    """GSPO, arXiv 2507.18071: as published, one ratio per sequence, clipped at 1 - 3e-4 and 1 + 4e-4."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence's ratio is clipped from below at 1 - clip_low; it is far closer to 1 than a token's."""
    clip_high: float = Field(default=4e-4, ge=0)
    """And from above at 1 + clip_high."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="sequence"))
    """The policy loss."""


class CISPOConfig(RelativeConfig):
    """CISPO, arXiv 2506.13585: as published, the weight has no lower bound and every token counts the same."""

    name: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low: with 1 there is no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""
    reducer: ReducerName | ScaledReducerName = "token_mean"
    """token_mean: every token counts the same."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="cispo"))
    """The policy loss."""


class SAPOConfig(RelativeConfig):
    """SAPO, arXiv 2511.20347: as published, tau 1.0 and 1.05. Its gate is no clip, so clip_low and clip_high are refused."""

    name: Literal["sapo"] = "sapo"
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="sapo"))
    """The policy loss."""


class GMPOConfig(RelativeConfig):
    """GMPO, arXiv 2507.20673: as published, log-ratios are clipped at -0.4 and 0.4."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """Smallest log-ratio of a token with a negative advantage: -clip_low."""
    clip_high: float = Field(default=0.4, ge=0)
    """Largest log-ratio of a token with a positive advantage."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="geometric_mean"))
    """The policy loss."""


class GRPOPassKConfig(RelativeConfig):
    """GRPO for pass@k, arXiv 2503.19595: only the best trajectory of a group is rewarded."""

    name: Literal["grpo_passk"] = "grpo_passk"


class RLOOConfig(PolicyConfig):
    """RLOO, arXiv 2402.14740. Published with a KL in the reward (kl_reward.coef)."""

    name: Literal["rloo"] = "rloo"


class OPOConfig(PolicyConfig):
    """OPO, arXiv 2505.23585: as published, without a KL and an entropy bonus, and meant for one optimizer step per rollout."""

    name: Literal["opo"] = "opo"


class GPGConfig(PolicyConfig):
    """GPG, arXiv 2504.02546: as published, neither clip nor KL, so clip_low and clip_high are refused."""

    name: Literal["gpg"] = "gpg"
    reducer: ReducerName | ScaledReducerName = "token_mean"
    """token_mean: every token counts the same."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="reinforce"))
    """The policy loss."""


class MaxRLConfig(PolicyConfig):
    """MaxRL, arXiv 2602.02710; rewards must not be negative."""

    name: Literal["maxrl"] = "maxrl"

    @model_validator(mode="after")
    def _keeps_rewards(self) -> MaxRLConfig:
        if self.kl_reward.coef > 0:
            raise ValueError(
                f"kl_reward.coef={self.kl_reward.coef:g} makes rewards negative, which maxrl cannot use; set kl_coef, which is in the "
                "loss, or choose another algorithm"
            )
        return self


class OTBConfig(PolicyConfig):
    """The optimal token baseline; align=action is verl's tir_optimal_token_baseline, position its optimal_token_baseline."""

    name: Literal["otb"] = "otb"
    align: Align = "action"
    """Tokens that count as the same step in two trajectories. action: their n-th trained token;
    position: their n-th token after the prompt, trained or not."""
    zero_tail: bool = True
    """No baseline where only the longest trajectory of a group goes on: it would be that one's own return."""

    @property
    def reads_logprobs_early(self) -> list[str]:
        return [*super().reads_logprobs_early, "the credit"]


class ReMaxConfig(PolicyConfig):
    """ReMax, arXiv 2310.10505. Published with a KL in the reward (kl_reward.coef)."""

    name: Literal["remax"] = "remax"


class ReinforcePlusPlusConfig(PolicyConfig):
    """REINFORCE++, arXiv 2501.03262. Published with gamma=1 and a k1 KL in the reward (kl_reward.coef)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a time step."""
    credit_over: Literal["actions", "all", "turns"] = "actions"
    """actions: trained tokens are the time steps; all: so are the environment's (slime); turns: each turn is credited by
    itself, so only the last one sees the final reward (verl)."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""


class ReinforcePlusPlusBaselineConfig(PolicyConfig):
    """REINFORCE++-baseline, arXiv 2501.03262. Published with a k2 KL in the loss (kl_coef, kl_estimator=k2)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = True
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""


class PPOConfig(PolicyConfig):
    """PPO, arXiv 1707.06347, with the advantages of arXiv 1506.02438. Published for control with clips of 0.2, gamma=0.99, lam=0.95."""

    name: Literal["ppo"] = "ppo"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a time step."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Weight of longer returns: 0 trusts the critic alone, 1 the rewards alone."""
    credit_over: CreditOver = "actions"
    """actions: trained tokens are the time steps, environment tokens carry value and advantage through (verl); all: environment
    tokens are steps too (slime)."""
    reward_at: RewardAt = "last_action"
    """Token that receives a trajectory's reward: its last trained token, or its last token of any
    origin (slime). The latter must be a time step: credit_over=all."""
    bootstrap_truncated: bool = False
    """Continue the return of a truncated trajectory with the critic's value after its last token
    (truncated: a token or turn limit cut it). false: nothing follows, as in slime and verl."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""
    reducer: ReducerName | ScaledReducerName = "token_mean"
    """token_mean: every token counts the same."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """The critic's prediction is held within this of its old one (slime 0.2, verl 0.5); unset: no clip."""

    @model_validator(mode="after")
    def _rewards_a_step(self) -> PPOConfig:
        if self.reward_at == "last_token" and self.credit_over != "all":
            raise ValueError(
                f"reward_at=last_token with credit_over={self.credit_over} loses the reward where the environment wrote the last token, "
                "which is no time step then; set credit_over=all, or reward_at=last_action"
            )
        return self


class CustomAlgorithmConfig(Config):
    """An algorithm of your own."""

    name: Reference
    """Import reference `module:factory`, called with (options, plan)."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to an algorithm of your own."""


COMPARES = frozenset(
    ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "otb", "reinforce_plus_plus_baseline")
)
"""Names of the algorithms that compare the samples of a prompt."""

AlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | GSPOConfig
    | CISPOConfig
    | SAPOConfig
    | GMPOConfig
    | GRPOPassKConfig
    | RLOOConfig
    | OPOConfig
    | GPGConfig
    | MaxRLConfig
    | OTBConfig
    | ReMaxConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | PPOConfig
    | CustomAlgorithmConfig,
    OneOf(),
]
"""Which algorithm, and its settings; GRPO where `name` is left out."""
