"""The model against references written plainly, its names, its weights and what it costs."""

import math

import pytest
import torch
from small import VOCAB, plain_model, small_config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from islands.config_file import parse_config
from islands.initialize import initialize
from islands.models.llama import (
    PRESETS,
    Attention,
    Config,
    Llama,
    RMSNorm,
    build,
    num_flops_per_token,
)
from islands.rotary import rotary_tables, rotate

#: fp64 rounds at 1e-16; a few hundred terms of size one stay far below this, and mistakes far above.
TOLERANCE = 1e-12

SEQ_LEN = 16


def config(**keys: object) -> Config:
    sizes = dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=72, vocab_size=VOCAB)
    return parse_config(Config, sizes | keys)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def model_of(seed: int = 0, **keys: object) -> nn.Module:
    """A whole model in fp64, filled."""
    return plain_model(small_config(model=keys, run=dict(seed=seed)))


def tokens(batch: int = 2, length: int = SEQ_LEN) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


# Sizes.


@pytest.mark.parametrize(
    ("preset", "millions"),  # of bytes in, bytes out: 4 to 9 % below their names, which leaves room for a vocabulary
    [("quickstart", 1.05), ("15M", 14.36), ("60M", 54.90), ("150M", 142.1), ("1B", 944.9), ("7B", 6478)],
)
def test_a_preset_has_about_the_size_its_name_says(preset: str, millions: float) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(Config(preset=preset), seq_len=8).parameters()) / 1e6
    assert count == pytest.approx(millions, rel=1e-3)
    said = {"quickstart": 1.0, "1B": 1000.0, "7B": 7000.0}.get(preset) or float(preset.removesuffix("M"))
    assert count == pytest.approx(said, rel=0.09)


def test_every_preset_is_tested_and_can_be_chosen() -> None:
    assert list(PRESETS) == ["quickstart", "15M", "60M", "150M", "1B", "7B"]
    assert list(Config.model_fields["preset"].annotation.__args__) == list(PRESETS)


# Layers against references.


def test_rms_norm() -> None:
    norm = RMSNorm(8, eps=0.1).double()
    x, weight = random(3, 5, 8), random(8)
    norm.weight.data.copy_(weight)
    for row, result in zip(x.flatten(0, 1), norm(x).flatten(0, 1), strict=True):
        root = math.sqrt(sum(float(value) ** 2 for value in row) / 8 + 0.1)
        torch.testing.assert_close(result, row / root * weight, rtol=0, atol=TOLERANCE)


def test_rotary_tables_hold_the_angles_of_the_paper() -> None:
    cos, sin = rotary_tables(head_size=6, positions=50, theta=500.0, device=torch.device("cpu"))
    for position in (0, 1, 49):
        for pair in range(3):
            angle = position / 500.0 ** (2 * pair / 6)
            assert float(cos[position, pair]) == pytest.approx(math.cos(angle), abs=TOLERANCE)
            assert float(sin[position, pair]) == pytest.approx(math.sin(angle), abs=TOLERANCE)


def plainly_rotated(x: Tensor, theta: float) -> Tensor:
    """x (T, E): each pair (i, i + E/2) as a complex number, times e^(i angle)."""
    half = x.shape[-1] // 2
    result = torch.empty_like(x)
    for position in range(len(x)):
        for pair in range(half):
            turned = complex(x[position, pair], x[position, half + pair]) * complex(
                math.cos(position * theta ** (-pair / half)), math.sin(position * theta ** (-pair / half))
            )
            result[position, pair], result[position, half + pair] = turned.real, turned.imag
    return result


def test_rotation_turns_the_pairs() -> None:
    x = random(2, 7, 3, 6)
    result = rotate(x, *rotary_tables(6, 7, 100.0, torch.device("cpu")))
    for batch in range(2):
        for head in range(3):
            torch.testing.assert_close(
                result[batch, :, head], plainly_rotated(x[batch, :, head], 100.0), rtol=0, atol=TOLERANCE
            )


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_tables(8, 30, 10000.0, torch.device("cpu"))
    q, k = (rotate(random(8).expand(1, 30, 1, 8), cos, sin)[0, :, 0] for _ in range(2))
    scores = q @ k.T
    torch.testing.assert_close(scores[:-9, :-9], scores[9:, 9:], rtol=0, atol=TOLERANCE)
    assert (scores[0, 0] - scores[0, 9]).abs() > 0.01


def plain_attention(layer: Attention, x: Tensor, heads: int, kv_heads: int) -> Tensor:
    """x (T, D), position by position and head by head."""
    size = layer.head_size
    q, k, v = (x @ projection.weight.T for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        own, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
        queries, keys = plainly_rotated(q[:, own], 10000.0), plainly_rotated(k[:, theirs], 10000.0)
        rows = []
        for position in range(len(x)):
            scores = (queries[position] @ keys[: position + 1].T / math.sqrt(size)).exp()
            rows.append(scores / scores.sum() @ v[: position + 1, theirs])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=-1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_attention_with_shared_heads(kv_heads: int) -> None:
    layer = Attention(config(num_kv_heads=kv_heads)).double()
    x = random(2, 6, 32)
    result = layer(x, *rotary_tables(8, 6, 10000.0, torch.device("cpu")))
    for batch in range(2):
        expected = plain_attention(layer, x[batch], heads=4, kv_heads=kv_heads)
        torch.testing.assert_close(result[batch], expected, rtol=0, atol=TOLERANCE)


def plain_logits(model: Llama, ids: Tensor) -> Tensor:
    """One sequence (T,) through the whole model."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x = model.embed_tokens.weight[ids]
    for block in model.layers.values():
        x = x + plain_attention(block.self_attn, norm(x, block.input_layernorm.weight), heads=4, kv_heads=2)
        hidden, mlp = norm(x, block.post_attention_layernorm.weight), block.mlp
        gate = hidden @ mlp.gate_proj.weight.T
        x = x + (gate / (1 + (-gate).exp()) * (hidden @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return norm(x, model.norm.weight) @ model.lm_head.weight.T


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_whole_model(tied: bool) -> None:
    model = model_of(tied_embeddings=tied)
    for parameter in model.parameters():  # so large that no part vanishes beside another
        parameter.mul_(8 if parameter.dim() > 1 else 1.5)
    ids = tokens()
    for row, logits in zip(ids, model(ids), strict=True):
        torch.testing.assert_close(logits, plain_logits(model, row), rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_a_position_sees_what_is_before_it_and_nothing_after() -> None:
    model, ids = model_of(), tokens(batch=1)
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % VOCAB
    same = (model(ids) == model(changed)).all(dim=-1)[0]
    assert same[:9].all() and not same[9:].any()


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other_and_may_be_shorter() -> None:
    model, ids = model_of(), tokens()
    torch.testing.assert_close(model(ids[1:, :5]), model(ids)[1:, :5], rtol=0, atol=TOLERANCE)


# Parameters.

HUGGING_FACE_NAMES = [
    "embed_tokens.weight",
    *(
        f"layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
    "norm.weight",
    "lm_head.weight",
]


def test_parameters_are_named_as_in_hugging_face_without_their_prefix() -> None:
    assert [name for name, _ in model_of().named_parameters()] == HUGGING_FACE_NAMES


def test_tied_embeddings_are_one_parameter_before_and_after_initialization() -> None:
    model = model_of(tied_embeddings=True)
    assert [name for name, _ in model.named_parameters()] == HUGGING_FACE_NAMES[:-1]
    assert model.lm_head.weight is model.embed_tokens.weight
    model(tokens()).square().sum().backward()
    untied = model_of()
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_a_seed_gives_its_own_weights() -> None:
    first, same, other = (dict(model_of(seed).named_parameters()) for seed in (0, 0, 1))
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1)  # norms begin at one


def test_no_two_parameters_begin_alike() -> None:
    matrices = [(name, p.detach()) for name, p in model_of().named_parameters() if p.dim() > 1]
    for index, (name, one) in enumerate(matrices):
        for other_name, other in matrices[:index]:
            length = min(one.numel(), other.numel())
            correlation = torch.corrcoef(torch.stack([one.flatten()[:length], other.flatten()[:length]]))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(length), f"{name} follows {other_name}"


def test_weights_have_the_spread_they_should() -> None:
    deviations = {name: float(p.detach().std()) for name, p in model_of(num_layers=8).named_parameters() if p.dim() > 1}
    for name, deviation in deviations.items():  # 1024 draws and more: 2.2 % standard error
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert deviation == pytest.approx(0.02 / math.sqrt(16) if into_residual else 0.02, rel=0.11)


def test_weights_do_not_depend_on_the_order_of_modules() -> None:
    with torch.device("meta"):
        model = build(config(), SEQ_LEN)
        turned = build(config(), SEQ_LEN)
    turned._modules = dict(reversed(turned._modules.items()))
    turned.layers._modules = dict(reversed(turned.layers._modules.items()))
    for each in (model, turned):
        initialize([each], torch.device("cpu"), torch.float32, seed=0)
    names = [name for name, _ in turned.named_parameters()]
    assert names[0] == "lm_head.weight"  # it is turned
    expected = dict(model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in turned.named_parameters())


# Cost.


@pytest.mark.parametrize("keys", [{"num_layers": 3}, {"num_kv_heads": 4, "tied_embeddings": True}])
def test_operations_are_those_that_torch_counts(keys: dict[str, object]) -> None:
    """Exactly: matrix products as they are, and half of attention's, since torch counts what the causal mask hides."""
    batch, sizes = 2, config(**keys)
    model = model_of(**keys)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # as matrix products it can count
        model(tokens(batch)).sum().backward()
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    assert sorted(counts) == ["aten.bmm", "aten.mm"]
    expected = counts["aten.mm"] + counts["aten.bmm"] / 2
    assert num_flops_per_token(sizes, SEQ_LEN) * batch * SEQ_LEN == expected
