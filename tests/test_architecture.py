"""Rules of the source: imports go one way, and each kind of side effect has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "labctl"

# From the lowest ring to the highest: a package imports from its own ring only itself, and from those below it.
RINGS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("model",),
    ("system", "naming"),
    ("health",),
    ("accelerators",),
    ("config",),
    ("launchers", "workloads"),
    ("fit", "records"),
    ("jobs",),
    ("hub",),
    ("backends",),
    ("backends.docker.hosts",),
    ("backends.docker.compose", "backends.docker"),
    ("backends.docker.images",),
    ("backends.docker.lab",),
    ("backends.docker.attach", "backends.docker.deploy"),
    ("backends.docker.checks",),
    ("backends.docker.backend", "backends.kubernetes"),
    ("runs",),
    ("bundle", "doctor", "reports"),
    ("batches",),
    ("flows",),
    ("ui",),
    ("cli",),
)
RING = {name: number for number, ring in enumerate(RINGS) for name in ring}
AT_MOST_IN_ROOT = 5
# Data in, data out: what stands left of the plan.
PURE = {
    "backends.docker.compose.devcontainer",
    "backends.docker.compose.render",
    "backends.docker.deploy.plan",
    "backends.spec",
    "batches.bisect",
    "batches.evaluate",
    "batches.schedule",
    "config.hostfile",
    "config.inventory",
    "config.settings",
    "config.yaml_reader",
    "errors",
    "fit",
    "health",
    "launchers",
    "model",
    "naming",
    "records.finder",
    "records.known_metrics",
    "records.metrics",
    "records.outlook",
    "records.verdict",
    "reports",
    "system.routing",
    "system.tar",
    "workloads.deepspeed_config",
    "workloads.schema",
}
HEAVY = {
    "docker",
    "python_on_whales",
    "jinja2",
    "matplotlib",
    "numpy",
    "yaml",
    "cryptography",
    "typer",
    "requests",
    "huggingface_hub",
    "dotenv",
    "kubernetes",
    "websocket",
    "filelock",
    "packaging",
    "starlette",
    "uvicorn",
    "anyio",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a module's file: ``labctl.cli.x``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(name: str) -> str:
    """Return the longest prefix of a module's name that RING has, else its first part: ``labctl.cli.x`` -> ``cli``."""
    parts = name.split(".")[1:]
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RING), parts[0] if parts else "")


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file; cached."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the full names of imported modules, with lines; fail on relative imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            yield from ((target_of(str(node.module), alias.name), node.lineno) for alias in node.names)


def target_of(module: str, name: str) -> str:
    """Return the module that ``from module import name`` loads: ``module.name`` if labctl has it, else ``module``."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    return f"{module}.{name}" if module.startswith("labctl") and is_module else module


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements that run at import: not those inside functions or under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from at_module_level(getattr(node, block, []))


def where(path: Path, line: int, what: str) -> str:
    """Return ``path:line: what``, relative to the repository."""
    return f"{path.relative_to(PACKAGE.parent)}:{line}: {what}"


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each function that a file calls, with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def names_used(path: Path) -> Iterator[tuple[str, int]]:
    """Yield dotted names such as ``os.environ``, also of names imported separately."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_every_module_has_its_ring() -> None:
    """The part of each module is listed in RINGS."""
    assert {part(module_name(path)) for path in MODULES} - {""} <= set(RING)


def test_imports_go_one_way() -> None:
    """A module imports only modules of its own part and of parts in an earlier ring of RINGS."""
    wrong = [
        where(path, line, f"{module_name(path)} imports {target}, which stands beside or above it")
        for path in MODULES
        if (package := part(module_name(path)))
        for target, line in imports(ast.walk(tree(path)))
        if target.startswith("labctl.") and part(target) != package and RING[part(target)] >= RING[package]
    ]
    assert wrong == []


def test_the_root_holds_few_modules() -> None:
    """The package's top folder has at most five modules."""
    modules = [path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= AT_MOST_IN_ROOT, modules


def test_no_module_imports_itself_through_others() -> None:
    """Find modules that load each other at import; a package's ``__init__`` may load its modules on demand."""
    graph = {
        module_name(path): {target for target, _ in imports(at_module_level(tree(path).body)) if target != "labctl"}
        for path in MODULES
    }
    while leaves := [name for name, targets in graph.items() if not targets & (set(graph) - {name})]:
        for name in leaves:
            del graph[name]
    assert graph == {}


def test_launchers_do_not_know_each_other() -> None:
    """No module of labctl.launchers imports another one of it."""
    wrong = [
        where(path, line, target)
        for path in (PACKAGE / "launchers").glob("*.py")
        for target, line in imports(ast.walk(tree(path)))
        if target.startswith("labctl.launchers.")
    ]
    assert wrong == []


BACKENDS = tuple(sorted(path.parent.name for path in (PACKAGE / "backends").glob("*/__init__.py")))
# What runs on every backend.
GENERIC = ("runs", "batches", "doctor", "reports")


def test_only_a_backend_and_the_commands_that_are_its_own_know_a_backend() -> None:
    """GENERIC parts import no backend; no backend imports another."""
    assert [name for name in BACKENDS if not {f"backends.{name}", f"backends.{name}.backend"} & RING.keys()] == []

    def backend_of(name: str) -> str:
        """Return the backend that a module's name is below, empty if none."""
        parts = name.split(".")
        return parts[2] if parts[1:2] == ["backends"] and parts[2:3] and parts[2] in BACKENDS else ""

    wrong = [
        where(path, line, target)
        for path in MODULES
        for target, line in imports(ast.walk(tree(path)))
        if (backend := backend_of(target))
        and (part(module_name(path)) in GENERIC or backend_of(module_name(path)) not in ("", backend))
    ]
    assert wrong == []


def test_the_documents_have_these_rings() -> None:
    """docs/dev/develop.md lists RINGS, ring by ring."""
    text = (PACKAGE.parent / "docs/dev/develop.md").read_text(encoding="utf-8")
    assert "\n".join(f"      {', '.join(ring)}" for ring in RINGS) in text


def test_the_documents_name_each_member_of_a_backend() -> None:
    """docs/dev/develop.md names each method of the protocol Backend."""
    text = (PACKAGE.parent / "docs/dev/develop.md").read_text(encoding="utf-8")
    adding = text.partition("**A backend**")[2].partition("**A launcher:**")[0]
    classes = [node for node in tree(PACKAGE / "backends/__init__.py").body if isinstance(node, ast.ClassDef)]
    (protocol,) = [node for node in classes if node.name == "Backend"]
    members = [node.name for node in protocol.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in members if f"`{name}`" not in adding] == []


def test_the_modules_that_are_pure_exist() -> None:
    """Each name in PURE is a module of labctl or a package with modules."""
    names = {module_name(path).removeprefix("labctl.") for path in MODULES}
    assert {
        name for name in PURE if name not in names and not any(each.startswith(f"{name}.") for each in names)
    } == set()


def test_what_stands_left_of_the_plan_has_neither_clock_nor_network_nor_docker() -> None:
    """Modules in PURE import no time, network, process or Docker module."""
    unwanted = {"time", "datetime", "random", "secrets", "socket", "urllib", "subprocess", "docker", "threading"}
    wrong = [
        where(path, line, f"imports {target}")
        for path in MODULES
        if {module_name(path).removeprefix("labctl."), part(module_name(path))} & PURE
        for target, line in imports(ast.walk(tree(path)))
        if target.split(".")[0] in unwanted and target != "urllib.parse"
    ]
    assert wrong == []


def test_only_output_prints() -> None:
    """Only labctl.cli.output prints or reads input."""
    printing = {"print", "sys.stdout.write", "sys.stderr.write", "typer.echo", "typer.secho", "input"}
    wrong = [
        where(path, line, name)
        for path in MODULES
        for name, line in calls(path)
        if name in printing and module_name(path) != "labctl.cli.output"
    ]
    assert wrong == []


def test_only_the_command_line_exits() -> None:
    """No module outside labctl.cli calls sys.exit or raises typer.Exit or SystemExit."""
    leaving = {"sys.exit", "exit", "quit", "os._exit", "typer.Exit", "SystemExit"}
    wrong = [
        where(path, line, name)
        for path in MODULES
        for name, line in calls(path)
        if name in leaving and part(module_name(path)) != "cli"
    ]
    assert wrong == []


# What these do with it: hand this process's own environment on to the programs that they start.
READS_ENVIRONMENT = {"labctl.system.process"}


def test_only_the_command_line_reads_the_process_environment() -> None:
    """Only labctl.cli and system.process use os.environ or getenv."""
    wrong = [
        where(path, line, name)
        for path in MODULES
        for name, line in names_used(path)
        if name in {"os.environ", "os.environb", "os.getenv"}
        and part(module_name(path)) != "cli"
        and module_name(path) not in READS_ENVIRONMENT
    ]
    assert wrong == []


STARTERS = {"labctl.system.process"}


def test_only_one_module_starts_processes() -> None:
    """Only labctl.system.process imports subprocess and the like, or calls os.exec."""
    wrong = [
        where(path, line, target)
        for path in MODULES
        for target, line in imports(ast.walk(tree(path)))
        if target.split(".")[0] in {"subprocess", "pty", "multiprocessing", "asyncio"}
        and module_name(path) not in STARTERS
    ]
    wrong += [
        where(path, line, name)
        for path in MODULES
        for name, line in names_used(path)
        if name.startswith(("os.system", "os.popen", "os.exec", "os.spawn", "os.fork"))
        and module_name(path) not in STARTERS
    ]
    assert wrong == []


STARTS_DOCKER = {"backends.docker", "backends.docker.images"}


def test_only_engines_and_images_start_the_docker_program() -> None:
    """Look for argument lists that begin with ``docker``: lists or tuples of words, not paths of labctl's files."""
    wrong = [
        where(path, node.lineno, ast.unparse(node)[:60])
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.List, ast.Tuple))
        and any(isinstance(word, ast.Constant) and word.value == "docker" for word in node.elts[:1])
        and part(module_name(path)) not in STARTS_DOCKER
    ]
    assert wrong == []


def test_heavy_libraries_are_imported_where_they_are_needed() -> None:
    """No module imports one of HEAVY at its top level; two exceptions."""

    def allowed(name: str, library: str) -> bool:
        """Return True for the Docker client's module, and for typer in labctl.cli."""
        # The SDK's client is extended in a module of its own, which is imported where it is needed.
        return name == "labctl.backends.docker.api" or (library == "typer" and name.startswith("labctl.cli."))

    wrong = [
        where(path, line, target)
        for path in MODULES
        for target, line in imports(at_module_level(tree(path).body))
        if target.split(".")[0] in HEAVY and not allowed(module_name(path), target.split(".")[0])
    ]
    assert wrong == []


def loaded_by(code: str) -> set[str]:
    """Run code in a new interpreter, which it may exit; return the top-level names of the modules that it loaded."""
    program = f"import atexit, sys\natexit.register(lambda: sys.stderr.write('\\n'.join(sys.modules)))\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("import labctl.cli", set()),
        ("sys.argv = ['labctl', '--help']\nfrom labctl.cli import main\nmain()", set()),
        ("sys.argv = ['labctl', '--version']\nfrom labctl.cli import main\nmain()", {"subprocess"}),
    ],
    ids=["import", "help", "version"],
)
def test_the_command_line_opens_without_heavy_libraries(code: str, needed: set[str]) -> None:
    loaded = loaded_by(code)
    assert "labctl" in loaded
    assert loaded & {*HEAVY, "click", "rich", "subprocess", "logging"} == needed


@pytest.mark.parametrize("name", ["lab", "run", "cache", "exec", "host", "devices", "bundle"])
def test_commands_load_without_the_libraries_of_others(name: str) -> None:
    """A command's module loads none of HEAVY but typer."""
    heavy = HEAVY - {"typer"}
    assert loaded_by(f"import labctl.cli.{name}") & heavy == set()
