"""Who may import whom, checked over the syntax trees, and what must not lie where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

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


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[tuple[str, ...], ...]:
    """Every imported module and name, by its parts, wherever in the module the import stands."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which package it names"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(tuple(name.split(".")) for name in found)


def test_packages_import_only_what_lies_below_them() -> None:
    for module in MODULES:
        ours = {name[1] for name in imports_of(module) if name[0] == "kvferry"}
        assert ours <= MAY_IMPORT[package_of(module)], name_of(module)


def test_rooms_import_only_what_lies_below_them() -> None:
    for module in MODULES:
        package, *rest = module.relative_to(ROOT).parts
        rooms = ROOMS.get(package, {})
        if not rooms or rest == ["__init__.py"]:
            continue
        room = rest[0].removesuffix(".py")
        assert room in rooms, f"{name_of(module)}: a room that has no rule yet"
        inside = {name[2] for name in imports_of(module) if name[:2] == ("kvferry", package)}
        assert inside - {room} <= rooms[room], name_of(module)


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


def test_tests_lie_in_rooms_of_what_they_test() -> None:
    for package in ROOMS:
        rooms = {path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*/")}
        tests = ROOT / "tests" / package
        mirrored = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
        assert mirrored <= {*rooms, Path()}, package


def test_helpers_of_tests_know_no_test() -> None:
    rigs = [path for path in (ROOT / "tests" / "rigs").rglob("*.py")]
    assert len(rigs) > 20
    for path in rigs:
        ours = {name[2] for name in imports_of(path) if name[:2] == ("kvferry", "tests")}
        assert ours <= {"rigs"}, name_of(path)


def test_only_nodes_and_kernels_touch_tensors() -> None:
    for module in MODULES:
        if package_of(module) in WITHOUT_TORCH:
            assert not {name[0] for name in imports_of(module)} & TENSOR_LIBRARIES, name_of(module)


def test_nothing_pickles() -> None:
    for module in MODULES:
        assert not {name[0] for name in imports_of(module)} & PICKLERS, name_of(module)
        attributes = {node.attr for node in nodes_of(module) if isinstance(node, ast.Attribute)}
        assert not attributes & PICKLING_CALLS, name_of(module)
        assert "torch.load" not in module.read_text(), f"{name_of(module)}: use safetensors"


def test_only_the_settings_read_the_environment() -> None:
    settings = {"kvstore/process/settings.py", "kvstore/process/cores.py"}
    for module in MODULES:
        if name_of(module) not in settings:
            read = any(map(reads_environment, nodes_of(module)))
            assert not read, f"{name_of(module)}: take the environment as an argument"


def reads_environment(node: ast.AST) -> bool:
    """Something of `os.environ`, or `os.getenv`; the whole of it may be handed on."""
    if isinstance(node, ast.Subscript | ast.Attribute) and is_of_os(node.value, "environ"):
        return True
    return is_of_os(node, "getenv")


def is_of_os(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return (node.value.id, node.attr) == ("os", name)


def test_every_module_says_what_it_owns() -> None:
    assert not [name_of(module) for module in MODULES if not ast.get_docstring(tree_of(module))]


def test_what_must_not_lie_where() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__main__.py"], "others enter the wheel"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers would import it"
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert (ROOT / ".typing" / "kvferry").resolve() == ROOT


def test_the_map_is_short_and_says_what_the_rooms_say() -> None:
    text = (ROOT / "docs" / "map.md").read_text()
    assert text.count("\n") <= 80
    rows = dict(re.findall(r"^\| `([\w/]+)` \| (.+) \|$", text, re.MULTILINE))
    inits = [path for name in (*MAY_IMPORT, "bench") for path in (ROOT / name).rglob("__init__.py")]
    docstrings = {name_of(init.parent): ast.get_docstring(tree_of(init)) for init in inits}
    assert rows.keys() - docstrings.keys() == {"kernels", "tests"}, "these two are no packages"
    assert {name: rows.get(name) for name in docstrings} == docstrings


PATH = re.compile(r"`((?:\w+/)*\w+\.py)`")


def test_every_file_that_the_documents_name_exists() -> None:
    """By its whole path, or by the end of it, as in a paragraph about one package."""
    there = [f"/{name_of(path)}" for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    there.append("/__main__.py")
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for named in PATH.findall(document.read_text()):
            assert any(path.endswith(f"/{named}") for path in there), f"{document.name}: {named}"


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
