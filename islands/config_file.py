"""Read a configuration: typed defaults, then YAML, then ``key.sub=value`` from the command line.

Every problem is found before anything starts, and all of them are told at once: the key, the value, the rule and the
nearest valid choice.
"""

import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Iterable, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from islands import plugins


class ConfigError(ValueError):
    """The configuration can't be used. The message names key, value, rule and remedy; programs exit with code 2."""


class Section(BaseModel):
    """A typed section of the configuration. Unknown keys and wrong types are refused; values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PluginSection(Section):
    """A section whose ``type`` names a file; that file's ``Config`` holds the other keys."""

    type: str


@dataclass(frozen=True)
class Plugin:
    """Marks a field as a plug-in section: ``field: Annotated[PluginSection, Plugin("islands.models", "llama")]``."""

    package: str
    default: str


Root = TypeVar("Root", bound=Section)


def load_config(root: type[Root], path: str | Path, overrides: Iterable[str] = (), ignore: Iterable[str] = ()) -> Root:
    """Read the file at ``path`` and apply ``overrides`` (``key.sub=value``).

    Args:
        root: the class of the whole configuration.
        ignore: top-level sections that belong to another program and are skipped.

    Raises:
        ConfigError: naming every problem found.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give the path of a YAML configuration, such as configs/quickstart.yaml")
    try:
        raw = yaml.load(path.read_text(), Loader=_Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'train:', found {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(root, {key: value for key, value in raw.items() if key not in set(ignore)}, source=str(path))


def parse_config(root: type[Root], raw: dict[str, Any], source: str = "configuration") -> Root:
    """Validate a nested dict. Raises ConfigError naming every problem."""
    problems: list[str] = []
    concrete, raw = _resolve_plugins(root, raw, "", problems)
    if not problems:
        try:
            return concrete.model_validate(raw)
        except ValidationError as error:
            problems = [_explain(concrete, problem) for problem in error.errors()]
    raise ConfigError("\n".join([f"{source} can't be used:"] + [f"  {problem}" for problem in problems]))


def dump_config(config: Section) -> str:
    """The resolved configuration as YAML: reading it again gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-3`` as a string; everyone who writes it means a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"{override!r} is not of the form key.sub=value, for example train.steps=100")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {text!r} is not a valid YAML value: {error}") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        child = raw.setdefault(parent, {})
        if child is None:
            child = raw[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent} holds {child!r} and has no keys below it")
        raw = child
    raw[leaf] = value


def _plugin_of(field: FieldInfo) -> Plugin | None:
    return next((extra for extra in field.metadata if isinstance(extra, Plugin)), None)


def _resolve_plugins(
    section: type[Section], raw: Any, prefix: str, problems: list[str]
) -> tuple[type[Section], Any]:
    """Replace each plug-in field's class by the ``Config`` of the file that its ``type`` names, at every depth."""
    if not isinstance(raw, dict):
        return section, raw
    raw, concrete = dict(raw), {}
    for name, field in section.model_fields.items():
        value = {} if raw.get(name) is None else raw[name]  # "section:" with nothing below it means its defaults
        plugin, child = _plugin_of(field), field.annotation
        if not (isinstance(child, type) and issubclass(child, Section)):
            continue
        if plugin and isinstance(value, dict):
            kind = value.get("type", plugin.default)
            value = {**value, "type": kind}
            try:
                child = plugins.load(plugin.package, kind).Config
            except ValueError as error:
                problems.append(f"{prefix}{name}.type: {error}")
                continue
        child, raw[name] = _resolve_plugins(child, value, f"{prefix}{name}.", problems)
        concrete[name] = (child, ...)
    return (create_model(section.__name__, __base__=section, __module__=section.__module__, **concrete), raw)


def _explain(root: type[Section], problem: dict[str, Any]) -> str:
    """One line for one pydantic error: key, value, rule, and the nearest key where it was unknown."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        siblings = _keys_at(root, location[:-1])
        hint = plugins.did_you_mean(location[-1], siblings) or f"; the keys here are {', '.join(siblings)}"
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: must be given"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    found = problem["input"]
    if problem["type"] == "value_error" and isinstance(found, dict):  # a rule over several keys: its message has them
        return f"{key}: {rule}" if key else rule
    return f"{key}: {found!r} {rule}" if rule.startswith("should") else f"{key}: {found!r}: {rule}"


def _keys_at(section: Any, location: list[str]) -> list[str]:
    for part in location:
        section = section.model_fields[part].annotation
    if get_origin(section) in (Annotated, types.UnionType):
        section = get_args(section)[0]
    return list(section.model_fields)
