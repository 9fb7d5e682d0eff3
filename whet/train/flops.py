"""Number of floating-point operations that a model's passes need, by its matrices and its pairs of
query and key.

A product of [m, k] by [k, n] takes 2 m k n. Recomputation that spares memory, and pairs that a kernel
computes although a mask hides them, are not needed and not counted (model FLOPs, arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from whet.model.causal import CausalModel
from whet.model.scalar import ScalarModel


@dataclass(frozen=True, slots=True)
class PassSize:
    """Sizes that the operations of a pass depend on. A token goes through entries of matrices; a pair
    is a query with a key that it sees."""

    frozen: int
    """Entries that a token goes through and that do not train; of a mixture's experts, those that it is sent to."""
    trained: int
    """The others."""
    head: int
    """Entries of the output layer, for each line of logits."""
    head_trains: bool
    attention: int
    """Entries of keys and values that a pair multiplies, all heads and layers together."""

    def forward(self, num_tokens: int, num_pairs: int, num_lines: int) -> int:
        """Operations of a forward pass."""
        return 2 * ((self.frozen + self.trained) * num_tokens + self.attention * num_pairs + self.head * num_lines)

    def backward(self, num_tokens: int, num_pairs: int, num_lines: int) -> int:
        """Operations of a backward pass: every product's gradient by its input, and by its matrix where that trains."""
        entries, head = self.frozen + 2 * self.trained, self.head * (1 + self.head_trains)
        return 2 * (entries * num_tokens + 2 * self.attention * num_pairs + head * num_lines)

    def of_sequence(self, num_tokens: int) -> int:
        """Operations of a forward pass of one sequence, logits of every token included."""
        return self.forward(num_tokens, pairs_of(num_tokens), num_tokens)

    @property
    def without_adapter(self) -> PassSize:
        """Sizes of the model with its adapter off."""
        return replace(self, trained=0)


def pairs_of(num_tokens: int, before: int = 0) -> int:
    """Number of pairs of `num_tokens` tokens that see each other causally, and `before` earlier tokens."""
    return num_tokens * before + num_tokens * (num_tokens + 1) // 2


def pass_size(model: CausalModel | ScalarModel) -> PassSize:
    """Sizes of a whole model's passes, with its adapter if it has one."""
    hf, text = model.hf, model.config.get_text_config()
    output = hf.get_output_embeddings() if isinstance(model, CausalModel) else None
    head = output.weight if isinstance(output, nn.Linear) else None
    looked_up = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)}
    entries = {False: 0, True: 0}
    for p in hf.parameters():
        if p.dim() == 3:  # the experts of a layer, one after another
            entries[p.requires_grad] += p.numel() * text.num_experts_per_tok // p.shape[0]
        elif p.dim() == 2 and p is not head and id(p) not in looked_up:
            entries[p.requires_grad] += p.numel()
    return PassSize(
        frozen=entries[False],
        trained=entries[True],
        head=head.numel() if head is not None else 0,
        head_trains=head is not None and head.requires_grad,
        attention=text.num_hidden_layers * text.num_attention_heads * sum(_widths(model)),
    )


def _widths(model: CausalModel | ScalarModel) -> tuple[int, int]:
    """Entries of a key, and of a value."""
    text = model.config.get_text_config()
    known = text.to_dict()
    usual = known.get("head_dim") or text.hidden_size // text.num_attention_heads
    return known.get("qk_head_dim") or usual, known.get("v_head_dim") or usual
