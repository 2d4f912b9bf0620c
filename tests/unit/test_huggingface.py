"""Weights from folders of Hugging Face: what transformers makes of them, and what is refused. What goes out is in test_export."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import VOCAB, plain_model, small_config, small_corpus
from torch import Tensor, nn
from weight_folders import FROM_FOLDER, config_from, small_weights, write_folder

from diloco.config import RunConfig
from islands.config_file import ConfigError, dump_config, load_config, parse_config
from islands.huggingface import Weights, open_weights
from islands.initialize import initialize
from islands.island import meta_model
from islands.models.llama import from_hugging_face, hugging_face_name, to_hugging_face
from islands.rotary import RopeScaling, frequencies
from islands.run import other_tokens

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'test' has it")
    found.logging.set_verbosity_error()
    return found


def filled_model(config: RunConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of one process, begun from the folder in ``config``."""
    model = meta_model(config)
    initialize([model], CPU, dtype, config.run.seed, weights=open_weights(config.model, model))
    return model


def tokens(length: int = 16) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


# Against transformers.


@torch.no_grad()
def check_logits(transformers: Any, folder: Path) -> nn.Module:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = filled_model(config_from(folder))
    expected = theirs(tokens()).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(tokens()), expected, rtol=0, atol=1e-5)
    return ours


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    "keys",
    [
        dict(num_key_value_heads=2),
        dict(num_key_value_heads=1, tie_word_embeddings=True),
        dict(num_key_value_heads=4, rms_norm_eps=1e-3),
        dict(num_key_value_heads=2, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=500.0)),
        dict(num_key_value_heads=2, rope_parameters=dict(rope_type="llama3", rope_theta=300.0, **LLAMA3)),
    ],
    ids=["grouped heads", "tied", "all heads", "linear", "llama3"],
)
def test_a_folder_that_transformers_wrote_gives_the_same_logits(transformers: Any, tmp_path: Path, keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=512, initializer_range=0.3, **keys)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_logits(transformers, tmp_path)


SIZES = dict(
    hidden_size=32,
    intermediate_size=72,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    hidden_act="silu",
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    initializer_range=0.02,
    use_cache=True,
    bos_token_id=1,
    eos_token_id=2,
)

#: As they are published, with tiny sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": SIZES
    | dict(
        _name_or_path="meta-llama/Llama-2-7b-hf",
        max_position_embeddings=4096,
        num_key_value_heads=4,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="float16",
        transformers_version="4.31.0.dev0",
    ),
    "Llama 3.2": SIZES
    | dict(
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=8,
        max_position_embeddings=131072,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=dict(LLAMA3, factor=32.0, rope_type="llama3"),
        rope_theta=500000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    ),
    "TinyLlama": SIZES
    | dict(
        max_position_embeddings=2048,
        num_key_value_heads=1,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="float32",
    ),
    "SmolLM": SIZES
    | dict(
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=False,
        attention_dropout=0.0,
        is_llama_config=True,
        max_position_embeddings=8192,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
    ),
    "an old linear one": SIZES | dict(rope_scaling=dict(type="linear", factor=2.0), rms_norm_eps=1e-6),
    "a new one": SIZES
    | dict(
        dtype="bfloat16",
        head_dim=8,
        rms_norm_eps=1e-05,
        rope_parameters=dict(LLAMA3, rope_theta=500000.0, rope_type="llama3"),
        tie_word_embeddings=False,
    ),
    "the least": {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "model_type")}
    | dict(num_hidden_layers=2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_folders_as_they_are_published(transformers: Any, tmp_path: Path, name: str) -> None:
    """Their config.json as it is, the weights in one file, with the buffers that old ones have."""
    torch.manual_seed(0)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path))
    tensors = {key: value.float().clone() for key, value in theirs.state_dict().items()}
    assert ("lm_head.weight" in tensors) and tensors["lm_head.weight"].shape[0] == VOCAB  # tied ones have it twice
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    save_file(tensors | buffers, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(transformers, tmp_path)


@pytest.mark.parametrize("scaling", [dict(type="none"), dict(type="linear", factor=4.0), dict(type="llama3", **LLAMA3)])
def test_frequencies_are_those_of_transformers(transformers: Any, scaling: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config, _ = small_weights(rope_scaling=scaling, rope_theta=500.0)
    theirs = transformers.LlamaConfig(**to_hugging_face(config.model, 512))
    expected = LlamaRotaryEmbedding(theirs).inv_freq
    ours = frequencies(8, 500.0, RopeScaling.model_validate(scaling), CPU)
    torch.testing.assert_close(ours.float(), expected, rtol=1e-6, atol=0)


# Without transformers.


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_sizes_and_weights(tmp_path: Path, tied: bool) -> None:
    keys = dict(num_layers=3, rope_theta=77.0, norm_eps=1e-4, rope_scaling=dict(type="linear", factor=2.0), tied_embeddings=tied)
    weights = write_folder(tmp_path, **keys)
    config = config_from(tmp_path)
    assert config.model.model_copy(update={"init_from": ""}) == small_config(model=keys).model
    found = dict(filled_model(config).named_parameters())
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_resolved_configuration_says_all_and_can_be_read_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", rope_scaling=dict(type="llama3", **LLAMA3))
    config = config_from(tmp_path / "folder")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(RunConfig, tmp_path / "again.yaml") == config
    assert config.model_dump()["model"]["hidden_size"] == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_into_that_of_the_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = write_folder(tmp_path)
    save_file({hugging_face_name(name): weight.to(dtype) for name, weight in weights.items()}, tmp_path / "model.safetensors")
    for name, parameter in filled_model(config_from(tmp_path)).named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, weights[name].to(dtype).float())


def test_rows_that_padding_adds_are_drawn_as_ever(tmp_path: Path) -> None:
    weights = write_folder(tmp_path)
    config = config_from(tmp_path, pad_vocab_to_multiple_of=100)
    drawn, found = plain_model(config_from(tmp_path, pad_vocab_to_multiple_of=100)), filled_model(config)
    for name, parameter in found.named_parameters():
        rows = len(weights[name])
        assert torch.equal(parameter[:rows], weights[name])
        assert torch.equal(parameter[rows:], dict(drawn.named_parameters())[name][rows:])
    assert len(found.embed_tokens.weight) == 300


def test_the_fingerprint_is_that_of_the_weights_however_they_are_filed(tmp_path: Path) -> None:
    weights = write_folder(tmp_path)
    config = config_from(tmp_path)

    def fingerprint() -> str:
        return open_weights(config.model, meta_model(config)).fingerprint()

    first = fingerprint()
    names = {hugging_face_name(name): weight for name, weight in weights.items()}
    half = list(names)[:5]
    save_file({name: names[name] for name in half}, tmp_path / "a.safetensors")
    save_file({name: names[name] for name in names if name not in half}, tmp_path / "b.safetensors")
    places = {name: "a.safetensors" if name in half else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=places)))
    (tmp_path / "model.safetensors").unlink()
    assert fingerprint() == first
    names["model.norm.weight"][3] += 1
    save_file({name: names[name] for name in names if name not in half}, tmp_path / "b.safetensors")
    assert fingerprint() != first


# What is refused.


def refusal(folder: Path, **model: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config = config_from(folder, **model)
        open_weights(config.model, meta_model(config))
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(architectures=["MistralForCausalLM"]), "architectures=['MistralForCausalLM']"),
        (dict(architectures=None, model_type="gpt2"), "model_type=gpt2, and model.type=llama needs a LlamaForCausalLM"),
        (dict(attention_bias=True), "attention_bias=True, and model.type=llama needs False there"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act=gelu, and model.type=llama needs silu there"),
        (dict(head_dim=16), "head_dim=16, and model.type=llama needs heads of hidden_size/num_attention_heads=32/4"),
        (dict(sliding_window=64), "sliding_window=64"),
        (dict(quantization_config=dict(bits=4)), "quantization_config={'bits': 4}"),
        (dict(hidden_size=None), "no hidden_size, and model.type=llama needs one that tells all sizes"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "rope_type=yarn, and model.type=llama needs rotary embedding"),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type=dynamic"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), "rope_type=llama3 without low_freq_factor, high_freq_factor"),
        (dict(rope_scaling=dict(type="linear", factor="2")), "factor: '2' should be a number"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(num_attention_heads=5), "num_heads=5 does not cut"),
        (dict(hidden_size="32"), "model.hidden_size: '32' should be a whole number"),
    ],
)
def test_models_that_ours_can_not_be(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | dict(head_dim=None) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert told in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (dict(init_from=5), "model.init_from: 5 should be text"),
        (dict(hidden_size=64), "model.hidden_size=64 is not what model.init_from="),
        (dict(vocab_size=256), f"has, {VOCAB}; leave the key out"),
        (dict(tied_embeddings=True), "model.tied_embeddings=True is not what"),
        (dict(rope_theta=5.0), "model.rope_theta=5.0 is not what"),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "model.rope_scaling="),
        (dict(rope_scaling=dict(type="llama3", low_freq_factor=4.0)), "high_freq_factor=4.0 should be more than low_freq_factor=4.0"),
        (dict(rope_scaling=dict(factor=2.0)), "factor=2.0 belongs to type=linear or type=llama3"),
    ],
)
def test_keys_that_differ_from_the_folder(tmp_path: Path, model: dict[str, Any], told: str) -> None:
    write_folder(tmp_path)
    assert told in refusal(tmp_path, **model)
    config_from(tmp_path, hidden_size=32, tied_embeddings=False, rope_theta=10000.0, vocab_size=VOCAB)  # as they are: fine


def changed(folder: Path, change: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.norm.weight": None, "lm_head.weight": None}, "has no model.norm.weight, lm_head.weight"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(72, 32)}, "doesn't have: model.layers.2.mlp.up_proj.weight"),
        (
            {"model.layers.1.self_attn.k_proj.weight": torch.ones(32, 32)},
            "model.layers.1.self_attn.k_proj.weight is (32, 32) instead of (16, 32)",
        ),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "16 bits or more: model.norm.weight is I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Tensor | None], told: str) -> None:
    write_folder(tmp_path)
    changed(tmp_path, change)
    assert told in refusal(tmp_path)


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    assert "config.json can't be read: No such file" in refusal(tmp_path)
    write_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    assert "model.safetensors can't be read" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    told = refusal(tmp_path)
    assert "has pytorch_model.bin and no safetensors" in told and "save_pretrained('converted')" in told
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in refusal(tmp_path)
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors").write_bytes(whole)
    assert "has x.safetensors, y.safetensors and no model.safetensors.index.json" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={"model.norm.weight": "../x.safetensors"})))
    assert "has no weight_map of names to files beside it" in refusal(tmp_path)
    index.write_text(json.dumps(dict(weight_map={"nothing": "x.safetensors"})))
    assert "says that x.safetensors has nothing, and it has not" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    assert "config.json is not valid JSON" in refusal(tmp_path)


def test_a_part_is_read_without_the_rest_of_the_parameter(tmp_path: Path) -> None:
    """The values of a part, at any offset; also past the rows that are stored."""
    weights = write_folder(tmp_path)
    config = config_from(tmp_path, pad_vocab_to_multiple_of=100)
    opened = Weights(tmp_path, hugging_face_name, meta_model(config))
    out = torch.full((10, 7), -1.0)
    opened.read("embed_tokens.weight", (250, 20), out)
    assert torch.equal(out[:7], weights["embed_tokens.weight"][250:, 20:27]) and (out[7:] == -1).all()
    opened.read("embed_tokens.weight", (280, 0), out[7:])
    assert (out[7:] == -1).all()
    norm = torch.zeros(5)
    opened.read("norm.weight", (27,), norm)
    assert torch.equal(norm, weights["norm.weight"][27:])


def test_both_ways_are_the_same_keys() -> None:
    config, _ = small_weights(rope_scaling=dict(type="llama3", **LLAMA3), tied_embeddings=True, norm_eps=2e-5)
    keys = from_hugging_face(json.loads(json.dumps(to_hugging_face(config.model, 16))))
    assert keys.keys() == {*FROM_FOLDER, "norm_eps", "tied_embeddings", "rope_theta", "rope_scaling"}
    assert all(getattr(config.model, key) == value for key, value in keys.items())
    assert parse_config(type(config.model), keys) == config.model


def test_weights_with_a_tokenizer_begin_on_bytes_with_a_warning(tmp_path: Path) -> None:
    write_folder(tmp_path)
    config, text = config_from(tmp_path), small_corpus(vocab=256)
    text = replace(text, vocab_size=256)
    assert other_tokens(config, text) == "" == other_tokens(small_config(), text)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert f"are bytes, and model.init_from={tmp_path} has a tokenizer" in other_tokens(config, text)
    assert other_tokens(config, small_corpus()) == ""  # of another vocabulary
