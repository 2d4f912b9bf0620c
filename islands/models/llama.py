"""The Llama family: RMSNorm, rotary position embedding, grouped-query attention, SwiGLU (arXiv 2302.13971, 2307.09288).

Parameters have the names that Hugging Face's LlamaForCausalLM gives them inside ``model.``.
Shapes: B batch, T positions, D hidden, H query heads, K key-value heads, E head size, F intermediate, V vocabulary.
"""

import copy
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from islands.config import ModelSection
from islands.config_file import ConfigError
from islands.huggingface import fill_keys, refuse_differences
from islands.huggingface_llama import from_hugging_face, hugging_face_name, to_hugging_face
from islands.key_values import KeyValues
from islands.rotary import RopeScaling, rotary_tables, rotate
from islands.tensor_plan import Cut, TensorPlan

#: Sizes by name, about so many parameters; any key can be overridden beside ``preset``.
PRESETS: dict[str, dict[str, int]] = {
    "quickstart": dict(hidden_size=128, num_layers=5, num_heads=4, num_kv_heads=2, intermediate_size=384),
    "15M": dict(hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=6, intermediate_size=1024),
    "60M": dict(hidden_size=640, num_layers=12, num_heads=10, num_kv_heads=5, intermediate_size=1728),
    "150M": dict(hidden_size=1024, num_layers=12, num_heads=16, num_kv_heads=8, intermediate_size=2816),
    "1B": dict(hidden_size=2048, num_layers=20, num_heads=16, num_kv_heads=8, intermediate_size=5632),
    "7B": dict(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, intermediate_size=11008),
}


class Config(ModelSection):
    """``model.type: llama``. A preset gives the sizes; keys beside it override them."""

    type: Literal["llama"] = "llama"
    preset: Literal["quickstart", "15M", "60M", "150M", "1B", "7B"] = "quickstart"
    vocab_size: int = Field(256, ge=2, description="different tokens; 256 for bytes")
    pad_vocab_to_multiple_of: int = Field(
        1,
        ge=1,
        description="rows of embedding and output are rounded up to a multiple of it, the added ones being tokens that never "
        "occur; part of the model whatever the grid, so that islands with different grids agree",
    )
    hidden_size: int = Field(0, ge=0, description="width of the residual stream; 0: as the preset says, like all sizes below")
    num_layers: int = Field(0, ge=0)
    num_heads: int = Field(0, ge=0, description="query heads")
    num_kv_heads: int = Field(0, ge=0, description="key and value heads, each shared by num_heads/num_kv_heads query heads")
    intermediate_size: int = Field(0, ge=0, description="width inside the feed-forward block")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = Field(1e-5, gt=0)
    tied_embeddings: bool = Field(False, description="one matrix for token embedding and output")

    @model_validator(mode="before")
    @classmethod
    def _fill_sizes(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if raw.get("init_from") and isinstance(raw["init_from"], str):
            return fill_keys(raw, from_hugging_face)
        sizes = PRESETS.get(str(raw.get("preset", "quickstart")), {})
        return {**raw, **{key: value for key, value in sizes.items() if not raw.get(key)}}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and output. The added ones are classes of the loss like all others, which no target ever names."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of

    @model_validator(mode="after")
    def _is_what_the_folder_holds(self) -> "Config":
        if self.init_from:
            refuse_differences(self, from_hugging_face)
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "Config":
        if self.hidden_size % 2:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is odd, and rotary embedding turns pairs; "
                f"the nearest even size is {self.hidden_size + 1}"
            )
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            fitting = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % (2 * n) == 0]
            raise ValueError(
                f"model.num_heads={self.num_heads} does not cut model.hidden_size={self.hidden_size} into heads of even "
                f"size; the nearest that does is {min(fitting, key=lambda n: abs(n - self.num_heads))}"
            )
        if self.num_heads % self.num_kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"sizes that do: {', '.join(map(str, fitting))}"
            )
        return self


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dim, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)"""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_heads
        kv_size = config.num_kv_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValues | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). Head counts come from the projections: under tensor parallelism a rank has its share.

        With positions in ``cache``, x is the one that follows them.
        """
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        is_causal = q.shape[1] == k.shape[1]  # a single position sees all before it
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal, enable_gqa=q.shape[2] != k.shape[2]
        )  # (B, H, T, E)
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer layer: what strategies wrap."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValues | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids (B, T) to logits (B, T, V), V being ``padded_vocab_size``.

    Between pipeline stages there are hidden states (B, T, D).
    """

    def __init__(self, config: Config, seq_len: int) -> None:
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.num_layers)})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make embedding and output one parameter where the config says so; strategies that replace parameters call it again."""
        if self.config.tied_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def aliases(self) -> dict[str, str]:
        """Parameters that are copies where another pipeline stage has the original: name -> name of the original."""
        return {"lm_head.weight": "embed_tokens.weight"} if self.config.tied_embeddings else {}

    def layer_costs(self) -> list[int]:
        """Multiply-adds of a forward pass on one token, by layer; the first has the embedding, the last the output."""
        costs = [sum(p.numel() for p in block.parameters()) for block in self.layers.values()]
        costs = [cost + self.config.hidden_size * self.seq_len for cost in costs]  # causal attention: half of 2 D T
        costs[0] += self.config.hidden_size  # looked up, not multiplied
        costs[-1] += self.lm_head.weight.numel()
        return costs

    def stage(self, layers: range) -> "Llama":
        """A copy with only ``layers``; the first ones go with the embedding, the last with the output. Names stay."""
        stage = copy.deepcopy(self)
        for name in self.layers:
            if int(name) not in layers:
                del stage.layers[name]
        if layers.start > 0:
            stage.embed_tokens = None
        if layers.stop < len(self.layers):
            stage.norm = stage.lm_head = None
        return stage

    @property
    def rows_in_use(self) -> dict[str, int]:
        """Rows, without those that padding may have added, of the parameters that have one for each token."""
        return dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), self.config.vocab_size)

    @property
    def gives_logits(self) -> bool:
        """Whether this is the whole model or its last stage."""
        return self.lm_head is not None

    def hidden_shape(self, batch_size: int) -> tuple[int, int, int]:
        """(B, T, D) of what one pipeline stage hands to the next."""
        return batch_size, self.seq_len, self.config.hidden_size

    @property
    def blocks(self) -> nn.ModuleDict:
        """The layers, each wrapped as a unit by the strategies."""
        return self.layers

    def tensor_plan(self) -> TensorPlan:
        """Attention is cut by heads, the feed-forward half by intermediate features, embedding and output by vocabulary."""
        attention, feed_forward = "layers.*.self_attn", "layers.*.mlp"
        plan = {
            "embed_tokens": Cut.VOCABULARY,
            "layers.*.input_layernorm": Cut.NORM,
            attention: Cut.HALF,
            f"{attention}.[qkv]_proj": Cut.COLUMNS,
            f"{attention}.o_proj": Cut.ROWS,
            "layers.*.post_attention_layernorm": Cut.NORM,
            feed_forward: Cut.HALF,
            f"{feed_forward}.gate_proj": Cut.COLUMNS,
            f"{feed_forward}.up_proj": Cut.COLUMNS,
            f"{feed_forward}.down_proj": Cut.ROWS,
            "norm": Cut.NORM,
            "lm_head": Cut.LOGITS,
        }
        absent = {name for name, module in self._modules.items() if module is None}  # other pipeline stages have them
        return {name: cut for name, cut in plan.items() if name not in absent}

    def init_buffers(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fill what is not a parameter; needed again after ``to_empty``."""
        head_size = self.config.hidden_size // self.config.num_heads
        cos, sin = rotary_tables(head_size, self.seq_len, self.config.rope_theta, device, self.config.rope_scaling)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)

    def init_parameter(self, name: str, generator: torch.Generator, out: Tensor) -> None:
        """Draw the whole parameter ``name`` into ``out`` (fp32, CPU), from a generator of its own."""
        if out.dim() == 1:
            out.fill_(1.0)
            return
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_residual else 0.02
        out.normal_(0.0, std, generator=generator)

    def new_cache(self) -> list[KeyValues]:
        """What :meth:`forward` keeps of a sequence, layer by layer."""
        return [KeyValues() for _ in self.layers]

    def forward(self, x: Tensor, cache: list[KeyValues] | None = None) -> Tensor:
        """(B, T) or, without the embedding, (B, T, D) -> (B, T, V) or, without the output, (B, T, D)

        Args:
            cache: a new one, or one of earlier positions, which x then has the next one of: (B, 1).
        """
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        first = len(cache[0]) if cache else 0
        cos, sin = self.cos[first:].to(x.dtype), self.sin[first:].to(x.dtype)
        for index, block in enumerate(self.layers.values()):
            x = block(x, cos, sin, cache[index] if cache else None)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def build(config: Config, seq_len: int) -> Llama:
    """The module; under ``torch.device("meta")`` it takes no memory."""
    return Llama(config, seq_len)


def check_tensor_parallel(config: Config, size: int) -> None:
    """Whether ``size`` ranks can share the model.

    Raises:
        ConfigError: they can't; with the sizes that can.
    """
    keys = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size")
    sizes = {f"model.{key}": getattr(config, key) for key in keys}
    vocabulary = f"the padded vocabulary (model.vocab_size={config.vocab_size}, "
    vocabulary += f"model.pad_vocab_to_multiple_of={config.pad_vocab_to_multiple_of})"
    sizes[vocabulary] = config.padded_vocab_size
    stuck = [f"{name}={number}" for name, number in sizes.items() if number % size]
    if stuck:
        fitting = [n for n in range(1, config.num_kv_heads + 1) if all(number % n == 0 for number in sizes.values())]
        pad = f". To round the vocabulary up, set model.pad_vocab_to_multiple_of to a multiple of {size}"
        raise ConfigError(
            f"parallel.tensor_parallel_size: {size} does not divide {' and '.join(stuck)}; sizes that divide these and all "
            f"else that is shared: {', '.join(map(str, fitting))}{pad if config.padded_vocab_size % size else ''}"
        )


def num_flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token: 6 for each weight of a matrix product, and attention's own."""
    head_size = config.hidden_size // config.num_heads
    attention = config.hidden_size * (2 * config.hidden_size + 2 * config.num_kv_heads * head_size)
    per_layer = attention + 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_layers * per_layer + config.hidden_size * config.padded_vocab_size
    return 6 * matrices + 6 * config.num_layers * config.hidden_size * seq_len  # causal: half of 12 L D T
