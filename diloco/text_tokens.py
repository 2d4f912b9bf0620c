"""Text to the tokens of a run and back: bytes, or those of the tokenizer that came with the weights it began from."""

import codecs
import json
from pathlib import Path
from typing import Callable, Protocol

from islands.config_file import ConfigError
from islands.data.base import NUM_BYTES
from islands.huggingface import CONFIG_FILE

_TOKENIZER = "tokenizer.json"


class TextTokens(Protocol):
    """Both directions; :meth:`decoder` is for tokens that come one by one.

    Attributes:
        ends: tokens after which a text is over.
    """

    num_tokens: int
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``."""

    def decoder(self) -> Callable[[int], str]:
        """A function that takes the next token and gives the text that is complete with it; often none."""


class Bytes:
    """Tokens are the bytes of UTF-8."""

    num_tokens = NUM_BYTES
    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """See :class:`TextTokens`."""
        return list(text.encode(errors="surrogateescape"))  # an argument that is no UTF-8 is its own bytes

    def decoder(self) -> Callable[[int], str]:
        """See :class:`TextTokens`. What is no UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token]))


class Tokenizer:
    """A ``tokenizer.json``, read by the library tokenizers.

    Raises:
        ConfigError: the library is not installed, or can't read the file.
    """

    def __init__(self, path: Path, num_tokens: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(f"{path} needs the library tokenizers, which is not installed: pip install 'diloco[tokenizers]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"{path} can't be read: {error}") from error
        self._stream = tokenizers.decoders.DecodeStream
        self.num_tokens, self.ends = num_tokens, _ends(path.with_name(CONFIG_FILE))

    def encode(self, text: str) -> list[int]:
        """See :class:`TextTokens`. With the tokens that the tokenizer puts before a text."""
        return self._tokenizer.encode(text).ids

    def decoder(self) -> Callable[[int], str]:
        """See :class:`TextTokens`."""
        stream = self._stream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def _ends(config_file: Path) -> frozenset[int]:
    """The ``eos_token_id`` of a model; there may be several, or none."""
    if not config_file.is_file():
        return frozenset()
    found = json.loads(config_file.read_text(encoding="utf-8")).get("eos_token_id")
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def find_tokens(began_from: Path | None, vocab_size: int) -> TextTokens:
    """The tokens of a model.

    Args:
        began_from: folder of Hugging Face that its run began from.

    Raises:
        ConfigError: the tokenizer can't be used; or there is none and the vocabulary is too small for bytes.
    """
    if began_from and (began_from / _TOKENIZER).is_file():
        return Tokenizer(began_from / _TOKENIZER, vocab_size)
    if vocab_size < NUM_BYTES:
        raise ConfigError(f"the model has model.vocab_size={vocab_size} tokens, fewer than the {NUM_BYTES} bytes, and no {_TOKENIZER}")
    return Bytes()
