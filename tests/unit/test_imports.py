"""What loads what, in fresh processes; and what may be named where. Each rule is shown to catch what it forbids."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for package in ("islands", "diloco") for file in (ROOT / package).rglob("*.py"))

#: Imports what the arguments name (``package.*``: all below it, too) and prints at each comma all that is loaded then.
_IMPORT = """
import importlib, pkgutil, sys
extra, *names = sys.argv[1:]
for name in [*names, ","]:
    if name == ",":
        print(*sorted(sys.modules))
        continue
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        if extra:
            package.__path__ = [extra]
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
"""


def loaded_in_turn(*groups: list[str], extra: Path | str = "") -> list[set[str]]:
    """Modules of one fresh process after importing each of ``groups``; with ``extra``, packages hold that folder's."""
    names = [name for group in groups for name in (*group, ",")][:-1]
    command = [sys.executable, "-c", _IMPORT, str(extra), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def loaded(*names: str, extra: Path | str = "") -> set[str]:
    """Modules that a fresh process has after importing ``names``."""
    return loaded_in_turn(list(names), extra=extra)[0]


def of(modules: set[str], *packages: str) -> set[str]:
    """Those of ``modules`` that are one of ``packages`` or below it."""
    return {module for module in modules if module.split(".")[0] in packages}


# What loads what.


def test_no_module_of_islands_loads_diloco_or_hivemind() -> None:
    modules = loaded("islands.*")
    files = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in SOURCES]
    assert of(set(files), "islands") <= modules  # all of them were imported
    assert not of(modules, "diloco", "hivemind")


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("import hivemind", "hivemind"),
        ("import diloco", "diloco"),
        ("from hivemind import dht", "hivemind"),
        ("import json", None),
    ],
)
def test_a_module_of_islands_that_loaded_them_would_be_caught(tmp_path: Path, text: str, caught: str | None) -> None:
    (tmp_path / "hivemind").mkdir()
    for name in ("__init__", "dht"):  # stands for the real one, which takes seconds to load
        (tmp_path / "hivemind" / f"{name}.py").touch()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "__init__.py").touch()
    (tmp_path / "deeper" / "wrong.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{text}\n")
    modules = loaded("islands.*", extra=tmp_path)
    assert "islands.deeper.wrong" in modules
    assert of(modules, "diloco", "hivemind") - {"hivemind.dht"} == ({caught} if caught else set())


ALGORITHM = ["schedule", "pseudo_gradient", "reduction", "outer_state", "outer_optimizers.base", "shared_memory"]


def test_the_algorithm_knows_nothing_of_ours_and_its_plugins_the_configuration_at_most() -> None:
    algorithm, plugins = loaded_in_turn(
        [f"diloco.{name}" for name in ALGORITHM], ["diloco.codecs.*", "diloco.outer_optimizers.*"]
    )
    assert {f"diloco.{name}" for name in ALGORITHM} <= algorithm and "torch" in algorithm
    assert not of(algorithm, "islands", "hivemind")
    assert {"diloco.codecs.none", "diloco.outer_optimizers.sgd"} <= plugins
    assert of(plugins, "islands", "hivemind") == {"islands", "islands.config", "islands.config_file", "islands.plugins"}


def test_training_islands_loads_no_hivemind_before_its_process_starts() -> None:
    modules = loaded("diloco.island", "diloco.cli", "diloco.status", "diloco.exchange.in_memory", "diloco.exchange.hivemind")
    assert "islands.island" in modules and not of(modules, "hivemind")


# What may be named where.


def environment_lines(tree: ast.AST) -> list[int]:
    """Lines that touch the environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {name.name for name in node.names})
    ]


def backend_lines(tree: ast.AST) -> list[int]:
    """Lines whose strings name a backend of torch.distributed; docstrings may."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
        and re.search(r"\b(gloo|nccl)\b", node.value, re.IGNORECASE)
    ]


def cuda_call_lines(tree: ast.AST) -> list[int]:
    """Lines that move something to the current GPU, whatever device the rank has."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
    ]


RULES: dict[Callable[[ast.AST], list[int]], set[str]] = {
    environment_lines: {
        "islands/process.py",
        "diloco/launch_plan.py",  # that of its children
        "diloco/sweep_places.py",  # and of its
        "diloco/planner_probe.py",  # likewise
        "diloco/exchange/hivemind/process.py",  # tells hivemind and its daemon to be quiet, in a process of their own
    },
    backend_lines: {"islands/process.py"},
    cuda_call_lines: set(),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_environment_backends_and_gpus_are_named_in_one_place(rule: Callable[[ast.AST], list[int]]) -> None:
    assert len(SOURCES) > 40
    found = {
        file.relative_to(ROOT).as_posix(): lines
        for file in SOURCES
        if (lines := rule(ast.parse(file.read_text(encoding="utf-8"), str(file))))
    }
    assert {name: lines for name, lines in found.items() if name not in RULES[rule]} == {}
    assert found.keys() >= RULES[rule]  # an exception that nobody needs any more goes away


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (environment_lines, "import os\nrank = os.environ['RANK']"),
        (environment_lines, "import os\nrank = os.getenv('RANK')"),
        (environment_lines, "#\nfrom os import path, environ"),
        (backend_lines, "'''May say gloo.'''\ninit(backend='nccl')"),
        (backend_lines, "'''.'''\ninit('cpu:gloo,cuda:NCCL')"),
        (cuda_call_lines, "torch.cuda.is_available()\nmodel.to(x).cuda()"),
    ],
)
def test_each_rule_catches_what_it_forbids(rule: Callable[[ast.AST], list[int]], text: str) -> None:
    assert rule(ast.parse(text)) == [2]
