"""The key by which an island is known: a file that the p2p daemon reads, and the peer id that follows from it.

Done by hand, since importing hivemind for it would delay every launch by seconds; a test compares with hivemind.
The format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from islands.config_file import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

_HEAD_BYTES = 5  # of the message, before the key itself


def make_identity(path: Path) -> str:
    """The peer id that others know an island by. Its private key is read from ``path``, and made first if there is none.

    Raises:
        ConfigError: the file holds something else.
    """
    import base58
    from cryptography.hazmat.primitives import serialization

    key = _read_key(path) if path.exists() else _write_new_key(path)
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    multihash = b"\x12\x20" + hashlib.sha256(_rsa_key_message(public)).digest()  # sha2-256, 32 bytes
    return base58.b58encode(multihash).decode()


def _write_new_key(path: Path) -> "RSAPrivateKey":
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_rsa_key_message(private))
    return key


def _read_key(path: Path) -> "RSAPrivateKey":
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    message = path.read_bytes()
    try:
        key = serialization.load_der_private_key(message[_HEAD_BYTES:], password=None)
        if isinstance(key, rsa.RSAPrivateKey) and message == _rsa_key_message(message[_HEAD_BYTES:]):
            return key
    except ValueError:
        pass  # told below, with all else that is no key
    raise ConfigError(f"{path} is not the key of an island. Remove it, and a new one is made: the island is then another one")


def _rsa_key_message(der: bytes) -> bytes:
    """The protobuf message {1: RSA (0), 2: der}. A 2048-bit key has 128 to 16383 bytes: its length takes two."""
    return b"\x08\x00\x12" + bytes([len(der) & 0x7F | 0x80, len(der) >> 7]) + der
