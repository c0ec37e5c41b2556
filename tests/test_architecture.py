"""The house keeps its shape: imports run downward, private names come through one door, files and functions stay small.

Each rule is a function of source text, and is shown to catch a breach.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "lightning_rl_engines"
FILES = sorted(PACKAGE.rglob("*.py"))
DOOR = "_compat"
FOREIGN = ("torch", "lightning", "transformers", "peft", "torchtitan", "jsonargparse", "safetensors", "torchmetrics")

# What each part of the package may import of the others when it is loaded; itself and `_compat` always.
# `export` is below `models`: a plan describes any Hugging Face model, and a stream any FSDP module, so neither knows
# ours. `checkpoint` is below `strategies`, which save and load through it.
_MODELS = {"algorithms", "sequence", "heads", "export", "models"}
_ENGINES = _MODELS | {"checkpoint", "strategies"}
ALLOWED: dict[str, set[str]] = {
    "__about__": set(),
    DOOR: set(),
    "optim": set(),
    "algorithms": set(),
    "sequence": set(),
    "heads": set(),
    "export": set(),
    "models": _MODELS,
    "checkpoint": _MODELS,
    "strategies": _ENGINES,
    "rollout": _ENGINES,
    "data": _ENGINES | {"rollout"},
    "modules": _ENGINES | {"rollout", "data", "optim"},
    "callbacks": _ENGINES | {"rollout", "data", "optim", "modules"},
}
TOP = {"__init__", "__main__", "cli", "cli_errors"}

# Lightning's protected hooks and fields, which a strategy, a launcher or a plugin overrides or fills: no public names.
OVERRIDDEN = {
    "_configure_launcher",
    "_get_process_group_backend",
    "_launcher",
    "_precision_plugin",
    "_process_group_backend",
    "_strategy",
}
# Underscores that are public by documentation.
PUBLIC = {
    "_fields",  # of named tuples
    "_exit",  # of os
    "_no_split_modules",  # of transformers' models: how a model names the layers that stay whole
    "_parameters",  # of torch modules: registered tensors by name, where a tie must survive replacement
    "_buffers",
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def walk_loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those below ``if TYPE_CHECKING``, which never run."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from walk_loaded(child)


def own_imports(source: str) -> set[str]:
    """Parts of the package that a file imports, also inside functions."""
    found = set()
    for node in walk_loaded(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.add("a relative import")
        found |= {name.split(".")[1] for name in names if name.startswith("lightning_rl_engines.")}
    return found


def breaches_of_order(part: str, source: str) -> set[str]:
    if part in TOP:
        return set()
    return own_imports(source) - ALLOWED[part] - {part, DOOR, "__about__"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(source: str) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes it assigns, fields and slots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_names(source: str, ours: set[str]) -> set[str]:
    """Private names of others that a file imports or reaches for, in imports, attributes and ``getattr``.

    Args:
        source: The file.
        ours: Private names that the package itself defines.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if any(is_private(part) for part in a.name.split("."))}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {name for name in names if any(is_private(part) for part in name.split("."))}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in ours | PUBLIC | OVERRIDDEN:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and is_private(name) and name not in ours | PUBLIC | OVERRIDDEN:
                found.add(ast.unparse(node))
    return found


def long_functions(source: str, limit: int = 60) -> set[str]:
    """Functions of more lines than the limit.

    Docstrings do not count: documentation must not compete with the budget. Nor does the signature of a constructor,
    which is the configuration, one argument a line.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            start = first if node.name == "__init__" else node
            lines = (node.end_lineno or 0) - start.lineno + 1
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= (first.end_lineno or 0) - first.lineno + 1
            if lines > limit:
                found.add(f"{node.name}: {lines}")
    return found


def rank_zero_hooks(source: str) -> set[str]:
    """Methods that Lightning's decorator runs on one rank alone: a collective inside would wait forever."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any("rank_zero" in ast.unparse(item) for item in node.decorator_list)
    }


def test_every_part_has_its_place() -> None:
    assert {part_of(path) for path in FILES} - TOP <= ALLOWED.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    assert breaches_of_order(part_of(path), path.read_text()) == set()


def test_maths_knows_nothing_of_lightning_nor_of_models() -> None:
    for part in ("algorithms", "heads"):
        for path in (PACKAGE / part).rglob("*.py"):
            found = re.findall(r"^\s*(?:from|import) (lightning|transformers|peft)\b", path.read_text(), re.MULTILINE)
            assert found == [], path
    for path in (PACKAGE / "sequence").rglob("*.py"):
        assert re.findall(r"^\s*(?:from|import) (lightning|peft)\b", path.read_text(), re.MULTILINE) == [], path


def test_private_names_of_others_come_through_one_door() -> None:
    ours = {name for path in FILES for name in own_names(path.read_text()) if is_private(name)}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in FILES
        if part_of(path) != DOOR
        for name in private_names(path.read_text(), ours)
    }
    assert found == set()


def test_files_and_functions_stay_small() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    long = {str(path.relative_to(PACKAGE)): long_functions(path.read_text()) for path in FILES}
    assert {name: functions for name, functions in long.items() if functions} == {}


def test_no_hook_runs_on_one_rank_alone() -> None:
    for part in ("callbacks", "modules", "strategies", "rollout", "checkpoint"):
        for path in (PACKAGE / part).rglob("*.py"):
            assert rank_zero_hooks(path.read_text()) == set(), path


def commands_of_readme(text: str) -> list[str]:
    """Lines of the README's shell blocks."""
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    ci = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    commands = commands_of_readme((REPOSITORY / "README.md").read_text())
    train, run_tests = commands[:2]
    assert run_tests == 'pip install -e ".[test]" && pytest -n 2 --dist loadfile'
    assert run_tests in ci
    # The other one takes minutes: what it runs is run in small by the tests of the command line.
    found = re.fullmatch(r'pip install -e "\.\[(\w+)\]" && lightning-rl fit --config (\S+)', train)
    assert found is not None, train
    assert (REPOSITORY / found[2]).is_file()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {found[1], "test"} <= project["optional-dependencies"].keys()
    assert "lightning-rl" in project["scripts"]


def test_the_rules_catch_what_they_are_for() -> None:
    assert breaches_of_order("algorithms", "from lightning_rl_engines.models import ModelConfig") == {"models"}
    assert breaches_of_order("export", "def f():\n    from lightning_rl_engines.strategies import Engine") == {
        "strategies"
    }
    assert breaches_of_order("models", "from lightning_rl_engines import cli") == {"cli"}
    assert breaches_of_order("heads", "from .x import y") == {"a relative import"}
    lazy = "if TYPE_CHECKING:\n    from lightning_rl_engines.strategies import Engine"
    assert breaches_of_order("models", lazy) == set()
    for breach in (
        "from torch.distributed.fsdp._runtime_utils import reshard",
        "from lightning.fabric.utilities.types import _PATH",
        "import torch._dynamo",
        "optimizer._hook()",
        "getattr(model, '_handle', None)",
        "self._foreign_field",
    ):
        assert private_names(breach, {"_mine"}), breach
    assert private_names("self._mine\nother._mine\nx.__dict__", {"_mine"}) == set()
    body = "\n".join("    x = 1" for _ in range(60))
    assert long_functions(f"def f():\n{body}") == {"f: 61"}
    assert long_functions(f"def f():\n    '''One\n\n    two.'''\n{body[:-10]}") == set()
    assert rank_zero_hooks("class A:\n    @rank_zero_only\n    def setup(self): ...") == {"setup"}
