"""Who may import whom, checked over the syntax trees, and what must not lie where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kvstore": {"kvstore"},
    "kernels": {"kernels"},
    "gateway": {"gateway", "kvstore"},
    "prefill_node": {"prefill_node", "kvstore", "kernels"},
    "decode_node": {"decode_node", "kvstore", "kernels"},
    "__main__": {"kvstore"},
}
GATEWAY_BASE = {"errors", "config", "params", "auth"}
ROOMS: dict[str, dict[str, set[str]]] = {
    "kvstore": {
        "errors": set(),
        "keys": {"errors"},
        "process": {"errors", "keys"},
        "wire": {"errors", "keys", "process"},
        "tiers": {"errors", "keys", "process"},
        "client": {"errors", "keys", "process", "wire", "tiers"},
        "node": {"errors", "keys", "process", "wire", "tiers", "client"},
        "store": {"errors", "keys", "process", "wire", "tiers", "node"},
    },
    "gateway": {
        **{name: GATEWAY_BASE - {name} for name in GATEWAY_BASE},
        "tokenizer": GATEWAY_BASE,
        "output": GATEWAY_BASE | {"tokenizer"},
        "prompt": GATEWAY_BASE | {"tokenizer", "output"},
        "router": GATEWAY_BASE | {"tokenizer", "output", "prompt"},
        "protocols": GATEWAY_BASE | {"tokenizer", "output", "prompt", "router"},
        "intake": GATEWAY_BASE | {"tokenizer", "output", "prompt", "router", "protocols"},
        "telemetry": GATEWAY_BASE | {"tokenizer", "output", "prompt", "router", "protocols"},
        "service": GATEWAY_BASE
        | {"tokenizer", "output", "prompt", "router", "protocols", "intake", "telemetry"},
        "http": GATEWAY_BASE
        | {"tokenizer", "output", "prompt", "router", "protocols", "intake", "telemetry"}
        | {"service"},
        "server": GATEWAY_BASE | {"tokenizer", "output", "prompt", "router", "service", "http"},
        "serve": {"config"},
        "cli": set(),
    },
}
"""Which rooms of its own package a room, or a module beside the rooms, may import."""

MOST_FILES = 14
PACKAGES = (*(name for name in MAY_IMPORT if name != "__main__"), "bench", "tests")
WITHOUT_TORCH = ("kvstore", "gateway", "__main__")
TENSOR_LIBRARIES = {"torch", "transformers", "flashinfer"}
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj", "read_pickle", "to_pickle"}
MODULES = sorted(
    path
    for package in MAY_IMPORT
    for path in (ROOT / package, ROOT / f"{package}.py")
    for path in ([path] if path.is_file() else path.rglob("*.py"))
)


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module and name, dotted, wherever in the module the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which package it names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(params=MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def module(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_packages_import_only_what_lies_below_them(module: Path) -> None:
    names = [name.split(".") for name in imports(tree_of(module))]
    ours = {name[1] for name in names if name[0] == "kvferry"}
    assert ours <= MAY_IMPORT[package_of(module)]


def test_rooms_import_only_what_lies_below_them(module: Path) -> None:
    package, *rest = module.relative_to(ROOT).parts
    rooms = ROOMS.get(package, {})
    if not rooms or rest == ["__init__.py"]:
        return
    room = rest[0].removesuffix(".py")
    assert room in rooms, "a room that has no rule yet"
    names = [name.split(".") for name in imports(tree_of(module))]
    others = {name[2] for name in names if name[:2] == ["kvferry", package]} - {room}
    assert others <= rooms[room]


def test_no_folder_is_crowded() -> None:
    inside = [path for package in PACKAGES for path in (ROOT / package).rglob("*/")]
    for folder in (*(ROOT / package for package in PACKAGES), *inside):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_the_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module.parent for module in MODULES if module.parent != ROOT}
    there = {".".join(("kvferry", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert {"kvferry", *there} == set(listed)


def test_only_nodes_and_kernels_touch_tensors(module: Path) -> None:
    tops = {name.split(".")[0] for name in imports(tree_of(module))}
    if package_of(module) in WITHOUT_TORCH:
        assert not tops & TENSOR_LIBRARIES


def test_nothing_pickles(module: Path) -> None:
    tree = tree_of(module)
    assert not {name.split(".")[0] for name in imports(tree)} & PICKLERS
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & PICKLING_CALLS
    assert "torch.load" not in ast.unparse(tree), "safetensors, never torch.load"


def test_only_the_settings_read_the_environment(module: Path) -> None:
    if module.relative_to(ROOT).as_posix() in (
        "kvstore/process/settings.py",
        "kvstore/process/cores.py",
    ):
        return
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.expr)]
    parts = [
        ast.unparse(node.value) for node in nodes if isinstance(node, ast.Subscript | ast.Attribute)
    ]
    read = "os.environ" in parts or "os.getenv" in map(ast.unparse, nodes)
    assert not read, "take the environment as an argument"


def test_every_module_says_what_it_owns(module: Path) -> None:
    assert ast.get_docstring(tree_of(module))


def test_what_must_not_lie_where() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__main__.py"], "others enter the wheel"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers would import it"
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert (ROOT / ".typing" / "kvferry").resolve() == ROOT


NAMED = re.compile(r"`(?:tests/)?(test_\w+\.py)(?:::(test_\w+))?`")


def test_every_test_that_the_documents_name_exists() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {one for path in documents for one in NAMED.findall(path.read_text())}
    assert len(found) > 20
    for file, test in sorted(found):
        places = list((ROOT / "tests").rglob(file))
        assert len(places) == 1, f"{file}: {places}"
        if test:
            functions = ast.walk(tree_of(places[0]))
            names = {it.name for it in functions if isinstance(it, ast.FunctionDef)}
            assert test in names, f"{file} has no {test}"


def test_every_row_of_the_failure_table_names_a_test() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## What dies, and what the client sees")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        assert any(test for _, test in NAMED.findall(row)), row


def loaded_by(code: str) -> set[str]:
    code += "; import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines())


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by("from kvferry.__main__ import main; main(['--help'])")
    assert not loaded & {*TENSOR_LIBRARIES, "numpy", "zmq", "starlette", "tokenizers"}


def test_the_gateway_loads_no_torch() -> None:
    paths = [module.relative_to(ROOT) for module in MODULES if package_of(module) == "gateway"]
    names = [".".join(("kvferry", *path.with_suffix("").parts)) for path in paths]
    loaded = loaded_by("import " + ", ".join(name.removesuffix(".__init__") for name in names))
    assert not loaded & TENSOR_LIBRARIES
