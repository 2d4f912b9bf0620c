"""A small run for tests: two layers, uneven sizes, random tokens; and what one process makes of it, written plainly."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from diloco.config import RunConfig
from islands import plugins
from islands.config_file import parse_config
from islands.data.base import Corpus
from islands.initialize import initialize, named_parameters, parameter_dtype
from islands.island import Island, meta_model

VOCAB = 257


def small_config(**sections: Any) -> RunConfig:
    """The configuration; each keyword is a section whose keys override."""
    raw: dict[str, dict[str, Any]] = dict(
        run=dict(name="small"),
        model=dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=72, vocab_size=VOCAB),
        data=dict(seq_len=16),
        optimizer=dict(lr=3e-3, warmup_steps=2),
        exchange=dict(type="in_memory"),
        train=dict(steps=5, global_batch_size=8, precision="fp64", eval_sequences=4),
    )
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    return parse_config(RunConfig, raw)


def small_corpus(tokens: int = 4000, vocab: int = VOCAB) -> Corpus:
    """Random tokens below ``vocab``, the same each time."""
    draw = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    return Corpus(draw, draw[: tokens // 4], VOCAB)


def whole_parameters(island: Island) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank; copies on several pipeline stages must not differ by a bit."""
    mine = {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in named_parameters(island.model.parts).items()
    }
    group = island.model.pipeline_group
    if group is None:
        return mine
    stages: list[dict[str, Tensor]] = [{}] * group.size()
    dist.all_gather_object(stages, mine, group=group)
    whole: dict[str, Tensor] = {}
    for name, parameter in (item for stage in stages for item in stage.items()):
        first = whole.setdefault(name, parameter)
        assert torch.equal(first.nan_to_num(7), parameter.nan_to_num(7)), f"copies of {name} differ"
    return whole


def plain_model(config: RunConfig) -> torch.nn.Module:
    """The model on one device, wrapped by nothing."""
    model = meta_model(config)
    initialize([model], torch.device("cpu"), parameter_dtype(config), config.run.seed)
    return model


def plain_training(config: RunConfig, batches: list[tuple[Tensor, Tensor]], rates: list[float]) -> dict[str, Any]:
    """What training on whole batches in one process gives: a loop without any of ours but the model."""
    model = plain_model(config)
    optimizer = plugins.build("islands.optimizers", config.optimizer, model.parameters())
    losses, norms = [], []
    for (inputs, targets), rate in zip(batches, rates, strict=True):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        clip = config.optimizer.clip_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return dict(losses=losses, norms=norms, parameters={n: p.detach() for n, p in named_parameters([model]).items()})
