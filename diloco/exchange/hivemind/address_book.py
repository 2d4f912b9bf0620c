"""Where the members of a run were last seen: so that an island that was restarted finds them though its peers are gone."""

import contextlib
import json
from pathlib import Path

from diloco.run_files import write_atomically


class AddressBook:
    """A small file beside the island's identity; without an identity file there is none."""

    def __init__(self, identity_file: str, run: str) -> None:
        self._path = Path(f"{identity_file}.peers") if identity_file else None
        self._run = run

    def read(self) -> list[str]:
        """Addresses of the members of this run, as they were; empty where nothing is known."""
        try:
            known = json.loads(self._path.read_text()) if self._path else {}
            addresses = known.get("addresses", []) if known.get("run") == self._run else []
            return [str(address) for address in addresses]
        except (OSError, ValueError, AttributeError):
            return []  # a file that is missing or torn only costs the shortcut

    def write(self, addresses: list[str]) -> None:
        """Remember them, where that is possible: the identity may lie in a folder that can't be written, or on a full disk."""
        if self._path:
            content = json.dumps({"run": self._run, "addresses": addresses}, indent=1)
            with contextlib.suppress(OSError):
                write_atomically(self._path, content.encode())
