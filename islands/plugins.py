"""Find a plug-in by the name of its file.

A plug-in is one file in a package such as ``islands/models``. It holds ``Config``, a :class:`~islands.config.PluginSection`
whose ``type`` is the file's name, and whatever else that package's ``__init__`` asks for.
"""

import difflib
import importlib
import pkgutil
from types import ModuleType
from typing import Any


def available(package: str) -> list[str]:
    """Names of the plug-ins in ``package``, sorted. ``base`` and names with a leading underscore are not plug-ins."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    """Import the plug-in ``name``.

    Raises:
        ValueError: there is no such plug-in; the message lists those that exist.
    """
    names = available(package)
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}{did_you_mean(str(name), names)}")
    return importlib.import_module(f"{package}.{name}")


def did_you_mean(word: str, choices: list[str]) -> str:
    """A hint such as ``" (did you mean 'llama'?)"``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def build(package: str, section: Any, *arguments: Any) -> Any:
    """What the plug-in that ``section.type`` names makes of ``section``."""
    return load(package, section.type).build(section, *arguments)
