"""verl's named presets of rollout correction, in the settings of `CorrectionConfig`.

Source: verl, `RolloutCorrectionConfig`: decoupled (the ratio is over the trainer's own old log-probs, and importance weights
make up for the engine) or bypass (the engine's log-probs are the old ones, or weights stand on a plain policy gradient).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

PresetName = Literal[
    "disabled",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
]
Mode = Literal["decoupled", "clip", "reinforce"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset's settings, and the loss that it is made for."""

    mode: Mode
    """decoupled: any loss; clip: the clipped loss over the engine's log-probs; reinforce: the plain policy gradient."""
    settings: Mapping[str, Any]
    """Settings of `CorrectionConfig`; a user's own come before them."""


def _preset(mode: Mode, *parts: Mapping[str, Any]) -> Preset:
    return Preset(mode, MappingProxyType({name: value for part in parts for name, value in part.items()}))


def _rejecting(statistic: str, high: float, low: float | None = None) -> dict[str, Any]:
    bounds = {"high": high} if low is None else {"high": high, "low": low}
    return {"reject": [{"statistic": statistic, **bounds}], "rejected": "mask"}


_TOKEN = {"weights": "token", "bound": "truncate", "high": 2.0}
_SEQUENCE = {"weights": "sequence", "bound": "truncate", "high": 2.0}
_ICEPOP = {"weights": "token", "bound": "icepop", "high": 5.0, "low": 0.5}
_PRODUCT = _rejecting("sum_k1", 2.0, 0.5)
_GEOMETRIC = _rejecting("mean_k1", 1.001, 0.999)
_K3 = _rejecting("mean_k3", 0.01)

PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        "disabled": _preset("decoupled"),
        "decoupled_token_is": _preset("decoupled", _TOKEN),
        "decoupled_seq_is": _preset("decoupled", _SEQUENCE),
        "decoupled_token_icepop": _preset("decoupled", _ICEPOP),
        "decoupled_seq_is_rs": _preset("decoupled", _SEQUENCE, _PRODUCT),
        "decoupled_geo_rs": _preset("decoupled", _GEOMETRIC),
        "decoupled_geo_rs_seq_tis": _preset("decoupled", _SEQUENCE, _GEOMETRIC),
        "decoupled_geo_rs_token_tis": _preset("decoupled", _TOKEN, _GEOMETRIC),
        "decoupled_k3_rs": _preset("decoupled", _K3),
        "decoupled_k3_rs_seq_tis": _preset("decoupled", _SEQUENCE, _K3),
        "decoupled_k3_rs_token_tis": _preset("decoupled", _TOKEN, _K3),
        "bypass_ppo_clip": _preset("clip"),
        "bypass_ppo_clip_geo_rs": _preset("clip", _GEOMETRIC),
        "bypass_ppo_clip_k3_rs": _preset("clip", _K3),
        "bypass_pg_is": _preset("reinforce", _SEQUENCE),
        "bypass_pg_token_icepop": _preset("reinforce", _ICEPOP),
        "bypass_pg_geo_rs": _preset("reinforce", _GEOMETRIC),
        "bypass_pg_geo_rs_seq_tis": _preset("reinforce", _SEQUENCE, _GEOMETRIC),
        "bypass_pg_geo_rs_token_tis": _preset("reinforce", _TOKEN, _GEOMETRIC),
    }
)
