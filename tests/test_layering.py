"""Imports point one way. The table is DESIGN.md's: who may import whom, and who may know torch or fastapi."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xllm_cli"

LEAVES = {"core", "errors", "flags"}
SETTINGS = {"declare", "flags"}
DECLARATIONS = {"service_flags", "memory_flags", "step_flags", "rank_flags", "foreign_flags"}
# part of the package, or one file of it → the other parts it may import; what has no row is an error
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"llm"},
    "core": set(),
    "errors": set(),
    "declare": set(),
    "flags": {"declare", *DECLARATIONS},
    **{name: {"declare"} for name in DECLARATIONS},
    "foreign_names": set(),
    "flagfile": {"errors"},
    "argv": {"declare", "flags", "foreign_names"},
    "sources": {*SETTINGS, "errors", "foreign_names"},
    "facts": {*SETTINGS, "errors"},
    "rules": {*SETTINGS, "facts"},
    "verdict": {*SETTINGS, "rules"},
    "config": {*SETTINGS, "errors", "facts", "rules", "verdict", "sources"},
    "manual": {*SETTINGS, "rules"},
    "schema": SETTINGS,
    "versions": set(),
    "logs": {*LEAVES, "service_flags"},
    "cli": {"commands", "declare", "errors"},
    "commands": {
        *SETTINGS,
        "errors",
        "argv",
        "config",
        "facts",
        "flagfile",
        "logs",
        "manual",
        "schema",
        "sources",
        "versions",
        "server",
        "fetch",
    }
    | {"bench", "neighbours"},
    "commands.inspection": {"flags", "facts", "versions", "vmm"},
    "fetch": {"errors", "gguf_to_folder"},
    "gguf_to_folder": {"errors"},
    "bench": {"errors", "fetch"},
    "bench.churn": {"bench", "cache", "core"},
    "bench.reaction": {"bench", "errors", "neighbours"},
    "bench.vmm_rig": {"bench", "cache", "core", "vmm", "worker"},
    "bench.vmm_cases": {"bench", "cache", "engine"},
    "server": {*LEAVES, "service_flags", "facts", "logs", "versions"},
    "neighbours": {"core", "errors"},
    "engine": {*LEAVES, "cache", "worker", "neighbours", "logs"},
    "engine.sizes": {*LEAVES, "cache", "engine", "vmm"},
    # the files that put an engine together
    "engine.parts": {*LEAVES, "cache", "engine", "worker", "vmm", "models", "loading", "neighbours"},
    "engine.joining": {*LEAVES, "cache", "worker", "vmm", "models", "loading", "neighbours"},
    "engine.start": {*LEAVES, "facts", "cache", "worker", "vmm", "models", "loading", "neighbours"},
    "llm": {*LEAVES, "config", "engine", "server", "vmm"},
    "cache": {"core", "errors", "_blocks"},
    "worker": {*LEAVES, "vmm", "models", "loading", "transfer"},
    "vmm": {"core", "errors", "_vmm"},
    "models": {"core", "errors", "_kernels"},
    "loading": {"core", "errors"},
    "transfer": {"core", "errors"},
}
WEB = {"fastapi", "starlette", "uvicorn"}
KNOW_WEB = {"server"}
KNOW_TORCH = {"engine", "worker", "vmm", "models", "loading", "transfer", "llm"}
NEVER_LOAD_TORCH = [
    "cli",
    "config",
    "flags",
    "rules",
    "argv",
    "fetch",
    "bench.serve",
    "core",
    "errors",
    "server.app",
    "cache.manager",
    "neighbours.peers",
]
# import name → distribution, where they differ
DISTRIBUTIONS = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
LOADED_BY_UVICORN = {"httptools"}


def imported_names(source: str, module: str) -> Iterator[str]:
    """Every dotted name that `source`, the text of `module`, imports anywhere, functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from (f"{start}.{alias.name}" for alias in node.names)


def modules() -> dict[str, str]:
    """Dotted module name → source text, for every Python file of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def part_of(module: str) -> str:
    """`xllm_cli.server.app` → `server`."""
    return module.split(".")[1]


def violations(module: str, source: str) -> list[str]:
    """What `module` imports against the tables above, one sentence each."""
    part = part_of(module)
    allowed = MAY_IMPORT.get(module.removeprefix("xllm_cli."), MAY_IMPORT.get(part))
    if allowed is None:
        return [f"{module}: {part} has no row in MAY_IMPORT"]
    wrong = []
    for name in imported_names(source, module):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "xllm_cli" and target not in allowed | {part, "__version__"}:
            wrong.append(f"{module} imports {name}; it may import only {sorted(allowed)}")
        if (top in WEB and part not in KNOW_WEB) or (top == "torch" and part not in KNOW_TORCH):
            wrong.append(f"{module} imports {name}; {part} must not know {top}")
    return wrong


def test_every_import_follows_the_table() -> None:
    wrong = [line for module, source in modules().items() for line in violations(module, source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("xllm_cli.cache.blocks", "from xllm_cli.vmm import pool"),
        ("xllm_cli.server.app", "def f():\n    from xllm_cli.engine.engine import Engine"),
        ("xllm_cli.server.app", "import torch.nn"),
        ("xllm_cli.engine.scheduler", "from xllm_cli.vmm.pool import PagePool"),
        ("xllm_cli.engine.process", "from fastapi import FastAPI"),
        ("xllm_cli.models.llama", "from ..loading.safetensors import open_checkpoint"),
        ("xllm_cli.core", "from xllm_cli.errors import XllmError"),
        ("xllm_cli.novelty", ""),
    ],
)
def test_the_table_catches(module: str, source: str) -> None:
    assert violations(module, source)


def test_llm_takes_only_the_tokenizer_of_the_server() -> None:
    names = [name for name in imported_names(modules()["xllm_cli.llm"], "xllm_cli.llm") if ".server" in name]
    assert all(name.startswith("xllm_cli.server.tokenizer") for name in names), names


def test_there_are_no_cycles() -> None:
    sources = modules()
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set(imported_names(source, module))
        names |= {name.rpartition(".")[0] for name in names}
        graph[module] = (names & sources.keys()) - {module}
    graph.pop("xllm_cli.__init__")  # its import of llm is lazy, and everything imports the package
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(graph) <= set(order)


@pytest.mark.parametrize("name", NEVER_LOAD_TORCH)
def test_importing_does_not_load_torch(name: str) -> None:
    code = f"import sys, xllm_cli.{name}; assert 'torch' not in sys.modules, 'torch was loaded'"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_every_dependency_is_declared_and_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    tops = {name.split(".")[0] for module, source in modules().items() for name in imported_names(source, module)}
    foreign = tops - sys.stdlib_module_names - {"xllm_cli"}
    imported = {DISTRIBUTIONS.get(name, name) for name in foreign} | LOADED_BY_UVICORN
    assert imported == declared
