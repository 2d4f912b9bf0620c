"""Read a configuration: typed defaults, then YAML, then ``key.sub=value`` from the command line.

Every problem is found before anything starts, and all of them are told at once: the key, the value, the rule and the
nearest valid choice.
"""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Hashable, Iterable, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from islands import plugins


class ConfigError(ValueError):
    """The configuration can't be used. The message names key, value, rule and remedy; programs exit with code 2."""


class Section(BaseModel):
    """A typed section of the configuration. Unknown keys and wrong types are refused; values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _fill_empty_sections(cls, raw: Any) -> Any:
        """``section:`` with nothing below it, or left away, means its defaults."""
        if not isinstance(raw, dict):
            return raw
        empty = [name for name, field in cls.model_fields.items() if _is_section(field) and raw.get(name) is None]
        return {**raw, **{name: {} for name in empty}}


class PluginSection(Section):
    """A section whose ``type`` names a file; that file's ``Config`` holds the other keys."""

    type: str


@dataclass(frozen=True)
class Plugin:
    """Marks a field as a plug-in section: ``field: Annotated[PluginSection, Plugin("islands.models", "llama")]``."""

    package: str
    default: str

    def config_class(self, raw: dict[Any, Any]) -> type[PluginSection]:
        """``Config`` of the file that ``type`` in ``raw`` names. Raises ValueError where there is none."""
        return plugins.load(self.package, raw.get("type", self.default)).Config

    def __get_pydantic_core_schema__(self, source: type[PluginSection], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Called by pydantic: the field holds an instance of the class that its ``type`` names."""
        return core_schema.no_info_plain_validator_function(
            lambda value: self._validate(source, value),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda section: section.model_dump()),
        )

    def _validate(self, base: type[PluginSection], value: Any) -> PluginSection:
        if isinstance(value, base):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("model_type", "should be a section")
        try:
            config_class = self.config_class(value)
        except ValueError as error:
            raise PydanticCustomError("plugin_type", "{problem}", {"problem": str(error)}) from None
        return config_class.model_validate({"type": self.default, **value})


Root = TypeVar("Root", bound=Section)


def load_config(root: type[Root], path: str | Path, overrides: Iterable[str] = (), ignore: Iterable[str] = ()) -> Root:
    """Read the file at ``path`` and apply ``overrides`` (``key.sub=value``).

    Args:
        root: the class of the whole configuration.
        ignore: top-level sections that belong to another program and are skipped.

    Raises:
        ConfigError: naming every problem found.
    """
    raw = read_raw(path, overrides)
    return parse_config(root, {key: value for key, value in raw.items() if key not in set(ignore)}, source=str(path))


def read_raw(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The file at ``path`` with ``overrides`` applied, as nested dicts that nothing has checked yet.

    Raises:
        ConfigError: it can't be read, or an override is none.
    """
    raw = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(raw, override)
    return raw


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    """``raw["a"]["b"] = value`` for the key ``a.b``. Raises ConfigError where a parent is not a section."""
    path = key.split(".")
    for depth, parent in enumerate(path[:-1], start=1):
        if raw.get(parent) is None:
            raw[parent] = {}
        if not isinstance(raw[parent], dict):
            raise ConfigError(f"{key}: {'.'.join(path[:depth])} holds {raw[parent]!r} and has no keys below it")
        raw = raw[parent]
    raw[path[-1]] = value


def parse_config(root: type[Root], raw: dict[str, Any], source: str = "configuration") -> Root:
    """Validate a nested dict. Raises ConfigError naming every problem."""
    try:
        return root.model_validate(raw)
    except ValidationError as error:
        problems = [f"  {_explain(root, raw, problem)}" for problem in error.errors(include_url=False)]
    raise ConfigError("\n".join([f"{source} can't be used:", *problems]))


def dump_config(config: Section) -> str:
    """The resolved configuration as YAML: reading it again gives an equal configuration."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, where plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Called by yaml for every mapping."""
        given = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in given if given.count(key) > 1), None):
            raise yaml.MarkedYAMLError(problem=f"the key {twice!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads."""


for _class in (_Loader, _Dumper):  # YAML 1.1 reads 1e-3 as a string; everyone who writes it means a number
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = plugins.did_you_mean(path.name, [file.name for file in path.absolute().parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: no such file{near}. Give the path of a YAML file, such as configs/quickstart.yaml")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}") from error
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'train:', found {_kind(raw)}")
    return raw or {}


def _yaml_problem(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else str(error.problem)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"{override!r} is not of the form key.sub=value, for example train.steps=100")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{key}: {text!r} is not a valid YAML value ({_yaml_problem(error)}); text with any of []{{}}:#&*!|>%@ "
            f"in it needs quotes that the shell leaves, for example '{key}=\"{text}\"'"
        ) from error
    set_key(raw, key, value)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _plugin_of(field: FieldInfo) -> Plugin | None:
    return next((extra for extra in field.metadata if isinstance(extra, Plugin)), None)


#: Where pydantic's own words are those of a programmer.
_RULES = {
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
    "list_type": "should be a list such as [a, b]",
    "too_short": "should not be empty",
    "string_too_short": "should not be empty",
}


def _explain(root: type[Section], raw: dict[str, Any], problem: ErrorDetails) -> str:
    """One line for one pydantic error: key, value, rule, and the nearest choice."""
    *parents, leaf = problem["loc"] or ("",)
    section, type_of_section = _section_at(root, raw, parents)
    key, kind, found = ".".join(map(str, problem["loc"])), problem["type"], problem["input"]
    rule = _RULES.get(kind) or re.sub("^(Value error, |Input )", "", problem["msg"])
    if kind in ("extra_forbidden", "invalid_key"):
        keys = list(section.model_fields)
        scope = f"of {'.'.join(map(str, parents))}.type={type_of_section}" if type_of_section else "here"
        hint = plugins.did_you_mean(str(leaf), keys) or f"; the keys {scope} are {', '.join(keys)}"
        return f"{key}: unknown key{hint}"
    if kind == "missing":
        description = section.model_fields[leaf].description
        return f"{key}: must be given" + (f" ({description})" if description else "")
    if kind == "plugin_type":
        return f"{key}.type: {rule}"
    if kind == "value_error" and (isinstance(found, (dict, list)) or repr(found) in rule):  # it names the values itself
        return rule if rule.startswith(f"{key}.") or not key else f"{key}: {rule}"
    if kind in ("model_type", "dict_type"):
        is_type = isinstance(found, str) and leaf in section.model_fields and _plugin_of(section.model_fields[leaf])
        example = f", as in {key}.type={found}" if is_type else ""
        return f"{key}: {found!r} should be a section with keys of its own{example}"
    if found is None:
        return f"{key}: is empty; {rule}"
    return f"{key}: {found!r} {rule}{_remedy(kind, found)}"


def _remedy(kind: str, found: Any) -> str:
    """What to write instead, where the type of a value is not what it looks like."""
    if kind == "string_type" and isinstance(found, (int, float, datetime.date)):
        return f"; put it in quotes: \"{found}\""
    if kind == "int_type" and isinstance(found, float) and found.is_integer():
        return f"; write {int(found)}"
    return ""


def _section_at(root: type[Section], raw: Any, location: Iterable[int | str]) -> tuple[type[Section], str]:
    """The class of the section at ``location`` in ``raw``; and its ``type`` where it is a plug-in."""
    section, type_of_section = root, ""
    for part in location:
        field = section.model_fields.get(part)
        if field is None or not _is_section(field):  # inside a list
            break
        raw = raw.get(part) or {}
        plugin = _plugin_of(field)
        section = plugin.config_class(raw) if plugin else field.annotation
        type_of_section = raw.get("type", plugin.default) if plugin else ""
    return section, type_of_section


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text"}.get(type(value), repr(value))
