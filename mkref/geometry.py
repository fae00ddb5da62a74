"""What follows from the fields of a config: widths, kinds of layers, parameters and bytes.

`Geometry` is the half of `NorthConfig` that computes. Bytes are those of bfloat16 weights, keys and
values.

What it does not do: count activations, padding or anything that a machine adds.
"""

from __future__ import annotations

from mkref.config_json import DENSE, SLIDING

__all__ = ["Geometry"]

BF16_BYTES = 2


class Geometry:
    """Derived quantities; the attributes are the fields of `NorthConfig`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    prefix_dense_intermediate_size: int | None
    num_experts: int
    num_experts_per_tok: int
    sliding_window: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    prefix_dense_sliding_window_pattern: int
    eos_token_id: int | tuple[int, ...] | None

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def q_width(self) -> int:
        """Rows of q_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_key_value_heads * self.head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text; empty if there is none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def n_dense_layers(self) -> int:
        """Layers with one dense MLP instead of experts."""
        return self.mlp_layer_types.count(DENSE)

    @property
    def n_sparse_layers(self) -> int:
        """Layers with a router and experts."""
        return self.num_hidden_layers - self.n_dense_layers

    def is_sliding(self, layer: int) -> bool:
        """Does the layer attend to the last `sliding_window` tokens only (itself included)?"""
        return self.layer_types[layer] == SLIDING

    def is_dense(self, layer: int) -> bool:
        """Does the layer have one dense MLP instead of experts?"""
        return self.mlp_layer_types[layer] == DENSE

    def uses_rope(self, layer: int) -> bool:
        """Does the layer rotate q and k? Full layers do not, unless dense with prefix pattern 1."""
        forced = self.is_dense(layer) and self.prefix_dense_sliding_window_pattern == 1
        return self.is_sliding(layer) or forced

    def mlp_width(self, layer: int) -> int:
        """Width of the layer's dense MLP, or of one of its experts."""
        if self.is_dense(layer) and self.prefix_dense_intermediate_size is not None:
            return self.prefix_dense_intermediate_size
        return self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    def shared_parameters(self) -> int:
        """Parameters that every token reads: all but the experts, embedding counted once."""
        hidden = self.hidden_size
        attention = 2 * hidden * (self.q_width + self.kv_width)
        total = self.vocab_size * hidden + (self.num_hidden_layers + 1) * hidden
        for layer in range(self.num_hidden_layers):
            dense = self.is_dense(layer)
            total += attention
            total += 3 * hidden * self.mlp_width(layer) if dense else self.num_experts * hidden
        return total

    def n_parameters(self) -> int:
        """All parameters, the tied embedding counted once."""
        experts = self.n_sparse_layers * self.num_experts * self.expert_parameters
        return self.shared_parameters() + experts

    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.shared_parameters() + (
            self.n_sparse_layers * self.num_experts_per_tok * self.expert_parameters
        )

    def expected_distinct_experts(self, rows: int) -> float:
        """Experts that `rows` tokens touch in one layer if each draws its own k uniformly."""
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** rows)

    def weight_bytes_per_token(self, distinct_experts: float | None = None) -> float:
        """Bytes of bfloat16 weights that one decode step reads.

        Args:
            distinct_experts: experts touched per sparse layer by all rows of the batch (a mean may
                be fractional); None means one row, `num_experts_per_tok`.
        """
        touched = self.num_experts_per_tok if distinct_experts is None else distinct_experts
        experts = self.n_sparse_layers * touched * self.expert_parameters
        return BF16_BYTES * (self.shared_parameters() + experts)

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that a sequence of `context` tokens keeps (and a step reads)."""
        tokens = sum(
            min(context, self.sliding_window) if self.is_sliding(layer) else context
            for layer in range(self.num_hidden_layers)
        )
        return tokens * 2 * self.kv_width * BF16_BYTES
