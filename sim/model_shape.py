"""What a dense decoder-only transformer's shape says about its size and its work."""

from dataclasses import dataclass, fields

from sim.errors import SimError


@dataclass(frozen=True, slots=True)
class Model:
    """One Llama-like model: grouped-query attention, gated MLP, RMS norm, no position parameters.

    Counts of parameters and of floating point operations follow from the matrix shapes; a multiply and an add are two
    operations. Keys and values are cached in the weights' dtype.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool  # the output head is the embedding matrix
    max_positions: int  # config value; a longer request is refused
    dtype_bytes: int = 2
    qk_norm: bool = False  # RMS norm over head_dim on queries and on keys (Qwen3)
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise SimError(f"model {self.name!r}: {item.name} must be a positive whole number, got {value!r}")
        if self.num_query_heads % self.num_kv_heads:
            raise SimError(
                f"model {self.name!r}: {self.num_query_heads} query heads do not divide evenly among "
                f"{self.num_kv_heads} KV heads"
            )

    @property
    def query_width(self) -> int:
        """Values of one token's queries in one layer."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Weights of a layer's matrix products: query, key, value, output, gate, up and down projections."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def embedding_parameters(self) -> int:
        """Weights of one vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """All weights; a tied head is counted once."""
        small = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        small += (self.query_width + 2 * self.kv_width) if self.qkv_bias else 0
        small += self.hidden if self.output_bias else 0
        small += (2 * self.intermediate + self.hidden) if self.mlp_bias else 0
        layers = self.num_layers * (self.matrix_parameters_per_layer + small)
        return layers + self.embedding_parameters * (1 if self.tied_embeddings else 2) + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes the weights take in GPU memory."""
        return self.num_parameters * self.dtype_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step must read: all but an untied input embedding, read by the row."""
        unread = 0 if self.tied_embeddings else self.embedding_parameters
        return (self.num_parameters - unread) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.kv_width * self.dtype_bytes

    @property
    def layer_flops_per_token(self) -> int:
        """Operations of the layers' matrix products for one token, attention's own products excluded."""
        return 2 * self.num_layers * self.matrix_parameters_per_layer

    @property
    def head_flops_per_row(self) -> int:
        """Operations of the output head for one row of logits."""
        return 2 * self.embedding_parameters

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations of attention for one (query token, key token) pair: q.k and p.v, all layers and query heads."""
        return 4 * self.num_layers * self.query_width
