"""Decoders of other families, run by transformers, with their attention replaced by the engine's
paged cache.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from zlab.engine.errors import ModelError
from zlab.engine.model.decoder import LanguageModel
from zlab.engine.model.layers import AttentionContext
from zlab.engine.model.spec import ModelConfig, as_ids, without_window

ATTENTION_NAME = "zipage_paged"
PROBE_TOKENS = 3
PROBE_TOLERANCE = 2e-2  # relative; a missed scale or cap is far above the rounding of 16-bit types


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers' attention modules, which call this with packed, rotated tokens `[1,
    H, T, d]`. Returns `[1, T, H, d]`.

    The kernels scale by 1/sqrt(d). Another scale is multiplied into the queries.
    """
    if attention_context is None:
        raise ModelError(
            f"{type(module).__name__} does not pass the attention context on; it cannot be "
            f"run paged"
        )
    lacking: dict[str, Any] = {
        name: others[name] for name in ("softcap", "s_aux") if others.get(name) is not None
    }
    window = others.get("sliding_window")
    if window is not None and window < getattr(module.config, "max_position_embeddings", math.inf):
        lacking["sliding_window"] = window
    for name, value_given in lacking.items():
        raise ModelError(
            f"{type(module).__name__} needs {name}={value_given!r}, which paged attention lacks"
        )
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if keys.shape[-1] != values.shape[-1]:
        raise ModelError(
            f"{type(module).__name__} has keys of {keys.shape[-1]} and values of "
            f"{values.shape[-1]}; they must agree"
        )
    plain = 1.0 / math.sqrt(queries.shape[-1])
    if scaling is not None and not math.isclose(scaling, plain, rel_tol=1e-6):
        queries = queries * (scaling / plain)
    attended = attention_context.attend(_layer_index(module), queries, keys, values)
    return attended.unsqueeze(0), None


transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)


class TransformersModel(LanguageModel):
    """A transformers causal language model behind the `LanguageModel` interface."""

    def __init__(self, model: transformers.PreTrainedModel, config: ModelConfig) -> None:
        """Replace the model's attention by the engine's.

        Raises:
            ModelError: a probe of a few tokens shows that the model does something that this way of
                running it leaves out.
        """
        self.config = config
        self.part = config
        self.rotation = None  # its layers turn keys by rules of their own
        model.eval()  # type: ignore[no-untyped-call]
        self._model = model.requires_grad_(False)
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._probe()

    @property
    @override
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @override
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = self._model.base_model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            attention_context=context,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits[:, : self.config.vocab_size]

    @override
    def warm_up(self, token_counts: Sequence[int], row_counts: Sequence[int]) -> None:
        model = self._model
        for count in row_counts:
            self._head(
                torch.zeros(count, self.config.hidden_size, dtype=model.dtype, device=model.device)
            )

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare a few tokens with transformers' own forward pass."""
        token_ids = torch.arange(PROBE_TOKENS, device=self._model.device) % self.config.vocab_size
        name = type(self._model).__name__
        own_attention = self._model.config._attn_implementation
        expected = self._model(token_ids[None], use_cache=False).logits[0].float()
        try:
            self._model.set_attn_implementation(ATTENTION_NAME)
            context = WholeSequence()
            found = self.logits(
                self.forward(
                    token_ids, torch.arange(PROBE_TOKENS, device=token_ids.device), context
                )
            )
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"{name} cannot be run with paged attention (it has {own_attention}): {error}"
            ) from error
        if len(context.layers) != self.config.num_layers:
            raise ModelError(
                f"{name} has {self.config.num_layers} layers, but {len(context.layers)} asked "
                f"for attention: "
                "its other layers keep a state that the paged cache lacks"
            )
        distance = float((found.float() - expected).norm() / expected.norm())
        if not distance < PROBE_TOLERANCE:
            raise ModelError(
                f"{name} gives other logits ({distance:.1e} apart) than its hidden states and "
                f"its head alone: "
                "it does something behind them that the engine lacks"
            )


class WholeSequence(AttentionContext):
    """Attention of one whole sequence without a cache. It remembers which layers attended."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    @override
    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        self.layers.add(layer)
        q, k, v = queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
        result = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return result.transpose(0, 1)


def load_hf(
    folder: Path, *, dtype: torch.dtype, device: torch.device
) -> transformers.PreTrainedModel:
    """Return the causal language model of a Hugging Face folder, read from safetensors only and
    streamed to the device.

    Args:
        folder: the folder.
        dtype: type of the weights.
        device: where the model runs.

    Raises:
        ModelError: transformers cannot build or read it; the message has the reason.
    """
    try:
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": str(device)},
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"transformers cannot load {folder}: {error}") from error
    return model


def config_of_hf(
    config: Mapping[str, Any], *, name: str, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """Return what the cache and the sampler have to know of a model that transformers runs.

    Args:
        config: the content of its config.json.
        name: names the model in messages.
        eos_token_ids: tokens that end an output.

    Raises:
        ModelError: a layer has a sliding window, or sizes have unknown names.
    """
    without_window(config, name)
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ModelError(
            f"model {name!r}: num_attention_heads and hidden_size are not in its configuration"
        )
    return ModelConfig(
        name=name,
        family=str(config.get("model_type")),
        num_layers=config.get("num_hidden_layers") or 0,
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size") or 4 * hidden,
        num_query_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config.get("vocab_size") or 0,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.get("max_position_embeddings") or 2048,
        eos_token_ids=eos_token_ids or as_ids(config.get("eos_token_id")),
    )


def _layer_index(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is")
    return index
