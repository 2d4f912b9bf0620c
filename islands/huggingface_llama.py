"""Between ``model.type: llama`` and ``config.json`` of a LlamaForCausalLM: keys and names of parameters."""

from typing import TYPE_CHECKING, Any

from islands.config_file import ConfigError, parse_config
from islands.rotary import RopeScaling

if TYPE_CHECKING:
    from islands.models.llama import Config

ARCHITECTURE = "LlamaForCausalLM"

#: Keys of ours and theirs, and what theirs is where config.json leaves it out; those without have to be there.
_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None),
    "intermediate_size": ("intermediate_size", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False),
}

#: What else changes what a model computes, and the only values that ours has.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
}

_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def hugging_face_name(name: str) -> str:
    """Name that a parameter has in files."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def from_hugging_face(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys of ``model`` for the content of a ``config.json``, of old form (``rope_theta``, ``rope_scaling``) or new
    (``rope_parameters``).

    Raises:
        ConfigError: it is of a model that ours can't be.
    """
    architectures = raw.get("architectures") or ([ARCHITECTURE] if raw.get("model_type") == "llama" else [])
    if architectures != [ARCHITECTURE]:
        raise _refused(f"architectures={architectures}, model_type={raw.get('model_type')}", f"a {ARCHITECTURE}")
    for key, allowed in _FIXED.items():
        if raw.get(key) not in allowed:
            raise _refused(f"{key}={raw[key]}", f"{allowed[-1]} there")
    missing = [theirs for theirs, default in _KEYS.values() if default is None and raw.get(theirs) is None]
    if missing:
        raise _refused(f"no {', '.join(missing)}", "one that tells all sizes")
    keys = {ours: default if raw.get(theirs) is None else raw[theirs] for ours, (theirs, default) in _KEYS.items()}
    heads, head_dim = keys["num_heads"], raw.get("head_dim")
    if head_dim is not None and head_dim * heads != keys["hidden_size"]:
        raise _refused(f"head_dim={head_dim}", f"heads of hidden_size/num_attention_heads={keys['hidden_size']}/{heads}")
    key_value_heads = raw.get("num_key_value_heads")
    return keys | {"num_kv_heads": heads if key_value_heads is None else key_value_heads} | _rope(raw)


def to_hugging_face(config: "Config", seq_len: int) -> dict[str, Any]:
    """Content of ``config.json``, in the old form that every version of transformers reads.

    Args:
        seq_len: positions that the model was trained on.
    """
    keys = {theirs: getattr(config, ours) for ours, (theirs, _) in _KEYS.items()}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **keys,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hugging_face(config.rope_scaling),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, from whichever form ``raw`` has."""
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise _refused(f"rope_type={kind}", "rotary embedding of type default, linear or llama3")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _refused(f"partial_rotary_factor={partial}", "heads that are turned whole")
    keys: dict[str, Any] = {"type": "none"}
    if kind != "default":
        keys = {"type": kind, "factor": rope.get("factor")}
    if kind == "llama3":
        fallback = {"original_max_position_embeddings": raw.get("max_position_embeddings")}
        keys |= {key: rope.get(key, fallback.get(key)) for key in _LLAMA3_KEYS}
    missing = [key for key, value in keys.items() if value is None]
    if missing:
        raise _refused(f"rope_type={kind} without {', '.join(missing)}", "one that tells all of these")
    scaling = parse_config(RopeScaling, keys, source="its rotary embedding")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    return {"rope_theta": 10000.0 if theta is None else theta, "rope_scaling": scaling}


def _scaling_to_hugging_face(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.type == "none":
        return None
    keys = ("factor", *(_LLAMA3_KEYS if scaling.type == "llama3" else ()))
    return {"rope_type": scaling.type, **{key: getattr(scaling, key) for key in keys}}


def _refused(found: str, wanted: str) -> ConfigError:
    return ConfigError(f"its config.json has {found}, and model.type=llama needs {wanted}")
