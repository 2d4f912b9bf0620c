"""Continuing a text: against a plain loop, with and without the cache, and what a person sees."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import plain_model
from torch import Tensor, nn
from weight_folders import config_from, small_weights, write_checkpoint, write_folder

from diloco import cli
from diloco.generate import continue_tokens, load_model, sampler, window_start
from diloco.saved_weights import open_saved
from diloco.text_tokens import Bytes, find_tokens
from islands.config_file import ConfigError

SEQ_LEN = 16


def small_model(**keys: Any) -> nn.Module:
    config, weights = small_weights(**keys)
    model = plain_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def take(count: int, *arguments: Any, **keys: Any) -> list[int]:
    tokens = continue_tokens(*arguments, **keys)
    return [next(tokens) for _ in range(count)]


def greedy(num_tokens: int = 256) -> Any:
    return sampler(num_tokens, 0.0, 0, 1.0, torch.Generator())


# Which token comes next.


@torch.no_grad()
@pytest.mark.parametrize("prompt", [[7], list(range(40, 50)), list(range(100, 140))], ids=["one", "some", "more than fit"])
def test_greedy_is_a_plain_loop(prompt: list[int]) -> None:
    model, context = small_model(), list(prompt)
    for _ in range(30):  # the window moves at 16, 24, 32 ... tokens
        start = 0
        while len(context) - start > SEQ_LEN:
            start += SEQ_LEN // 2
        logits = model(torch.tensor([context[start:]]))[0, -1, :256]
        context.append(int(logits.argmax()))
    assert len(set(context)) > 10  # no loop of one token, which anything would give
    assert take(30, model, prompt, SEQ_LEN, greedy()) == context[len(prompt) :]


@pytest.mark.parametrize("keys", [dict(), dict(num_kv_heads=4, tied_embeddings=True)], ids=["grouped heads", "all heads"])
@torch.no_grad()
def test_the_cache_changes_no_logits(keys: dict[str, Any]) -> None:
    seen: dict[bool, list[Tensor]] = {True: [], False: []}

    def choose(cached: bool) -> Any:
        return lambda logits: seen[cached].append(logits) or int(logits.argmax())

    model = small_model(**keys)
    for cached in (True, False):
        take(30, model, [7, 8, 9], SEQ_LEN, choose(cached), cached=cached)
    torch.testing.assert_close(torch.stack(seen[True]), torch.stack(seen[False]), rtol=0, atol=1e-5)


def test_the_cache_saves_work() -> None:
    lengths: list[int] = []
    model = small_model()
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    take(30, model, [1, 2, 3], SEQ_LEN, greedy())
    assert lengths == [3] + [1] * 13 + [9] + [1] * 7 + [9] + [1] * 7  # windows are filled anew when they move
    lengths.clear()
    take(3, model, [1, 2, 3], SEQ_LEN, greedy(), cached=False)
    assert lengths == [3, 4, 5]


@pytest.mark.parametrize("seq_len", [2, 3, 16, 17])
def test_windows_are_never_longer_than_the_model_and_never_short(seq_len: int) -> None:
    starts = [window_start(length, seq_len) for length in range(1, 100)]
    assert starts[:seq_len] == [0] * seq_len and starts == sorted(starts)
    assert all(seq_len // 2 < length - start <= seq_len for length, start in enumerate(starts, 1) if start)


# How it is drawn.


def draws(count: int = 1500, **settings: Any) -> Tensor:
    """How often each of six tokens comes, of logits whose probabilities are 1/2, 1/4, 1/8 ... in another order."""
    keys = dict(num_tokens=6, temperature=1.0, top_k=0, top_p=1.0) | settings
    choose = sampler(**keys, generator=torch.Generator().manual_seed(0))
    logits = torch.tensor([1 / 8, 1 / 2, 1 / 32, 1 / 4, 1 / 16, 1 / 32, 9.0]).log()  # the last one is of no token
    return torch.bincount(torch.tensor([choose(logits) for _ in range(count)]), minlength=7) / count


def test_draws_follow_the_probabilities() -> None:
    torch.testing.assert_close(draws(), torch.tensor([1 / 8, 1 / 2, 1 / 32, 1 / 4, 1 / 16, 1 / 32, 0]), rtol=0, atol=0.04)


def test_a_lower_temperature_sharpens() -> None:
    weights = torch.tensor([1 / 8, 1 / 2, 1 / 32, 1 / 4, 1 / 16, 1 / 32, 0]) ** 2
    torch.testing.assert_close(draws(temperature=0.5), weights / weights.sum(), rtol=0, atol=0.04)


def test_top_k_and_top_p_cut_the_tail() -> None:
    two, three = torch.tensor([0, 2, 0, 1, 0, 0, 0]) / 3, torch.tensor([1, 4, 0, 2, 0, 0, 0]) / 7
    torch.testing.assert_close(draws(top_k=2), two, rtol=0, atol=0.04)
    torch.testing.assert_close(draws(top_p=0.7), two, rtol=0, atol=0.04)  # 1/2 is less than 0.7, and 3/4 is enough
    torch.testing.assert_close(draws(top_p=0.8), three, rtol=0, atol=0.04)
    torch.testing.assert_close(draws(top_k=3, top_p=0.99), three, rtol=0, atol=0.04)
    assert draws(100, top_k=1)[1] == draws(100, top_p=0.01)[1] == draws(100, temperature=0.0)[1] == 1


# What a person sees.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config, weights = small_weights(pad_vocab_to_multiple_of=4)
    write_checkpoint(tmp_path / "run", config, weights, {name: -weight for name, weight in weights.items()})
    return tmp_path / "run"


def generated(capsys: pytest.CaptureFixture, run: Path, *arguments: str) -> str:
    assert cli.main(["generate", str(run), "--tokens", "20", "--device", "cpu", *arguments]) == 0
    return capsys.readouterr().out


def test_seeds_reproduce_and_weights_can_be_chosen(run: Path, capsys: pytest.CaptureFixture) -> None:
    first = generated(capsys, run, "--prompt", "héllo", "--seed", "1")
    assert first.startswith("héllo") and len(first) > 10
    assert generated(capsys, run, "--prompt", "héllo", "--seed", "1") == first
    assert generated(capsys, run, "--prompt", "héllo", "--seed", "2") != first
    assert generated(capsys, run, "--prompt", "héllo") != generated(capsys, run, "--prompt", "héllo")
    greedily = generated(capsys, run, "--prompt", "héllo", "--temperature", "0")
    assert greedily == generated(capsys, run, "--prompt", "héllo", "--top-k", "1")
    assert greedily != generated(capsys, run, "--prompt", "héllo", "--temperature", "0", "--weights", "own")


def test_it_is_the_model_of_the_checkpoint(run: Path, capsys: pytest.CaptureFixture) -> None:
    saved = open_saved(run, "own")
    model = load_model(saved, torch.device("cpu"))
    expected = small_model(pad_vocab_to_multiple_of=4)
    assert all(torch.equal(parameter, dict(expected.named_parameters())[name]) for name, parameter in model.named_parameters())
    tokens = take(20, expected, list(b"abc"), SEQ_LEN, greedy())
    decode = Bytes().decoder()
    text = generated(capsys, run, "--prompt", "abc", "--temperature", "0", "--weights", "own")
    assert text == "abc" + "".join(map(decode, tokens)) + "\n"


def test_the_prompt_may_come_from_standard_input_and_must_not_be_empty(
    run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a file"))
    assert generated(capsys, run, "--seed", "1").startswith("from a file")
    assert cli.main(["generate", str(run)]) == 2  # the file is at its end
    printed = capsys.readouterr()
    assert "there is nothing to continue: give --prompt TEXT" in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "0"], "0 should be at least 1"),
        (["--temperature", "-1"], "-1 should be from 0 to 100"),
        (["--top-p", "0"], "0 should be from 1e-09 to 1"),
        (["--top-k", "x"], "invalid"),
    ],
)
def test_settings_out_of_range(run: Path, capsys: pytest.CaptureFixture, arguments: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(run), "--prompt", "x", *arguments])
    assert ended.value.code == 2 and told in capsys.readouterr().err


# Tokens.


def test_bytes_become_text_as_soon_as_a_character_is_whole() -> None:
    decode = Bytes().decoder()
    assert [decode(token) for token in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert decode(0xFF) == "\ufffd"
    assert Bytes().encode("é") == [0xC3, 0xA9]


def test_a_vocabulary_too_small_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.vocab_size=100 tokens, fewer than the 256 bytes, and no tokenizer.json"):
        find_tokens(tmp_path, 100)


def test_a_tokenizer_that_came_with_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed; the extra 'test' has it")
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3} | {f"w{number}": number for number in range(4, 257)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "folder"
    write_folder(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = find_tokens(folder, 257)
    assert text.encode("two one") == [2, 1] and text.num_tokens == 257
    decode = text.decoder()
    assert [decode(token) for token in (3, 1, 256)] == ["three", " one", " w256"]
    config, weights = config_from(folder), small_weights()[1]
    write_checkpoint(tmp_path / "run", config, weights, anchor=None)
    printed = generated(capsys, tmp_path / "run", "--prompt", "one two", "--seed", "3")
    assert printed.startswith("one two") and set(printed.split()[2:]) <= words.keys()
    raw = json.loads((folder / "config.json").read_text())
    ends = next(token for token in text.encode(printed)[2:] if token != text.encode(printed)[2])  # as if this were the end
    (folder / "config.json").write_text(json.dumps(raw | dict(eos_token_id=[ends])))
    shorter = generated(capsys, tmp_path / "run", "--prompt", "one two", "--seed", "3")
    assert len(shorter) < len(printed) and printed.startswith(shorter.rstrip("\n"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.json can't be read"):
        find_tokens(folder, 257)


def test_the_library_for_tokenizers_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'diloco\[tokenizers\]'"):
        find_tokens(tmp_path, 257)
