"""Imports only go down: from each part of the product to parts below it."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ia_mech", "probes", "experiments")

# Low to high. Parts of one line know nothing of each other.
ORDER = [
    {"errors"},
    {"untrusted", "cli", "stats"},
    {"run"},
    {"display", "estimates"},
    {"data", "page", "results"},
    {"chat"},
    {"models"},
    {"engine"},
    {"likelihood", "lens", "steering"},
    {"judge"},
    {"rates"},
    {"settings"},
    {"collect"},
    {"report", "annotate"},
    {"probes"},
    {"experiments"},
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}

# The package offers ``sample`` and ``Run`` on first use, and ``ia_mech.sample`` is the command.
FRONT = {"ia_mech", "ia_mech.sample", "ia_mech.console"}
APART = [("chat", "engine")]  # templates and text here, token ids and tensors there
# Modules that load or run a language model; reading a run's states needs none of them.
MODEL_CODE = ("ia_mech.engine", "ia_mech.models.load", "ia_mech.likelihood", "ia_mech.collect")
NUMERIC = {"numpy", "scipy", *sys.stdlib_module_names}


def modules() -> dict[str, Path]:
    """Name → file of every module of the product."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): f for name, f in zip(names, files, strict=True)}


MODULES = modules()


def imported(file: Path, *, at_once: bool = False) -> Iterator[str]:
    """What a file imports, also inside functions and for types only; or what it imports at once."""
    tree = ast.parse(file.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, f"{file} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


@cache
def imports() -> dict[str, set[str]]:
    """Module → what it imports."""
    return {name: set(imported(file)) for name, file in MODULES.items()}


def part(module: str) -> str:
    """What a module of the product belongs to."""
    package, *rest = module.split(".")
    return rest[0] if package == "ia_mech" else package


def product_imports() -> Iterator[tuple[str, str]]:
    for module, names in imports().items():
        for name in names:
            if name.split(".")[0] in PACKAGES and not {module, name} & FRONT:
                yield module, name


def test_imports_only_go_down():
    upward = [
        f"{module} imports {name}"
        for module, name in product_imports()
        if part(module) != part(name) and LEVEL[part(module)] <= LEVEL[part(name)]
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module, name in product_imports():
        graph.setdefault(module, set()).add(name)
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_experiments_import_modules_and_not_the_package_which_offers_a_study():
    mine = [one for one in MODULES if one.startswith("experiments.")]
    assert not [one for one in mine if "ia_mech" in imports()[one]]


@pytest.mark.parametrize(("one", "other"), APART)
def test_parts_that_know_nothing_of_each_other(one, other):
    found = [pair for pair in product_imports() if {one, other} == {*map(part, pair)}]
    assert not found


def test_statistics_are_numpy_and_scipy_alone():
    stats = [module for module in MODULES if module.startswith("ia_mech.stats")]
    found = {name for module in stats for name in imports()[module] if name not in stats}
    assert {name.split(".")[0] for name in found} <= NUMERIC


def test_probes_load_no_language_model():
    found = [
        (module, name)
        for module, name in product_imports()
        if part(module) == "probes" and name.startswith(MODEL_CODE)
    ]
    assert not found


def test_triton_is_imported_only_where_it_is_used():
    """PyTorch for CPUs comes without it."""
    need = {f"ia_mech.engine.{name}" for name in ("attend_kernel", "draw_kernel", "captured")}
    for name in MODULES.keys() - need:
        found = {*imported(MODULES[name], at_once=True)}
        assert not found & need and "triton" not in found, name
