"""Continue a text with a trained model, token by token."""

import io
import itertools
import sys
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from diloco.saved_weights import SavedWeights
from diloco.text_tokens import find_tokens
from islands.config_file import ConfigError
from islands.initialize import named_parameters
from islands.process import pick_device

Choose = Callable[[Tensor], int]


def print_continuation(
    saved: SavedWeights, prompt: str, count: int, device: str, temperature: float, top_k: int, top_p: float, seed: int | None
) -> None:
    """Print ``prompt`` and then ``count`` tokens, each as it is made; fewer where the text comes to its end.

    Args:
        device: as ``run.device``.
        temperature, top_k, top_p: see :func:`sampler`.
        seed: None: another one each time.

    Raises:
        ConfigError: the prompt is empty, or the model's tokens are unknown.
    """
    text = find_tokens(saved.began_from, saved.model.vocab_size)
    tokens = text.encode(prompt)
    if not tokens:
        raise ConfigError("there is nothing to continue: give --prompt TEXT, or a text on standard input")
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    model = load_model(saved, pick_device(device))
    choose = sampler(text.num_tokens, temperature, top_k, top_p, generator)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character shows ? for it
    print(prompt, end="", flush=True)
    decode = text.decoder()
    following = itertools.islice(continue_tokens(model, tokens, saved.seq_len, choose), count)
    for token in itertools.takewhile(lambda token: token not in text.ends, following):
        print(decode(token), end="", flush=True)
    print()


@torch.no_grad()
def load_model(saved: SavedWeights, device: torch.device) -> nn.Module:
    """The whole model on ``device`` in fp32, filled parameter by parameter."""
    model = saved.build().to_empty(device=device).float()
    model.tie_weights()  # to_empty gives every module a tensor of its own
    model.init_buffers(device, torch.float32)
    for name, parameter in named_parameters([model]).items():
        parameter.copy_(saved.read(name))
    return model.eval()


def window_start(length: int, seq_len: int) -> int:
    """First of ``length`` tokens that the model looks at. A window that is full moves on by half, not by one at each token: then what
    is kept of its positions is computed anew only then."""
    stride = max(1, seq_len // 2)
    return max(0, -(-(length - seq_len) // stride)) * stride


@torch.inference_mode()
def continue_tokens(model: nn.Module, tokens: Sequence[int], seq_len: int, choose: Choose, cached: bool = True) -> Iterator[int]:
    """Endlessly many tokens that follow ``tokens``, of which there is at least one.

    Args:
        seq_len: positions that ``model`` has.
        choose: the next token for its logits (V,).
        cached: keep keys and values, so that a token costs one position; without, the same logits come slower.
    """
    device = next(model.parameters()).device
    context = list(tokens)
    start = cache = None
    while True:
        begin = window_start(len(context), seq_len)
        if not cached or begin != start:
            start, cache, fresh = begin, model.new_cache() if cached else None, context[begin:]
        else:
            fresh = context[-1:]
        logits = model(torch.tensor([fresh], device=device), cache)
        context.append(choose(logits[0, -1]))
        yield context[-1]


def sampler(num_tokens: int, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Choose:
    """How the next token is drawn.

    Args:
        num_tokens: of the vocabulary; logits beyond are of no token.
        temperature: 0: always the likeliest.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together have this probability; 1: all.
        generator: on the CPU, so that a seed gives the same draws on every device.
    """

    def choose(logits: Tensor) -> int:
        logits = logits[:num_tokens].float().cpu()
        if temperature == 0:
            return int(logits.argmax())
        chances, order = (logits / temperature).softmax(dim=-1).sort(descending=True, stable=True)
        if top_k:
            chances[top_k:] = 0
        likelier = chances.cumsum(dim=-1) - chances  # what all likelier ones have together
        chances[likelier >= top_p * chances.sum()] = 0
        return int(order[torch.multinomial(chances, 1, generator=generator)])

    return choose
