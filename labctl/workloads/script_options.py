"""Options of a workload's Python scripts, read from their text; nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from labctl.system.files import read_limited

PARSER = "ArgumentParser"
PARTLY = ("parse_known_args", "parse_known_intermixed_args")
"""Methods that leave options to other code."""


def declared(scripts: Iterable[Path]) -> frozenset[str]:
    """Return the names of options in quotes in scripts' texts, without dashes; a script that is unreadable has none."""
    return frozenset(chain.from_iterable(re.findall(r"""["']--([\w-]+)["']""", _text(path)) for path in scripts))


def are_all_declared(folder: Path, script: str) -> bool:
    """Tell if a script of a folder takes no options but those in quotes there: by argparse, to which no library adds.

    Options that a library makes, as transformers' HfArgumentParser does of the fields of classes and
    deepspeed.add_config_arguments of its own, are in no text of the folder.
    """
    trees = [] if Path(script).is_absolute() else list(_trees(folder, folder / script, set()))
    nodes = list(chain.from_iterable(map(ast.walk, trees)))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    has_parser = any(_name(call.func) == PARSER for call in calls)
    return has_parser and not any(map(_imports_another, trees)) and not any(_adds(call, functions) for call in calls)


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return read_limited(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _trees(folder: Path, path: Path, seen: set[Path]) -> Iterator[ast.Module]:
    """Yield the syntax trees of a script and of the modules of its folder that it imports; none of invalid Python."""
    if path in seen or path.suffix != ".py":
        return
    seen.add(path)
    try:
        tree = ast.parse(_text(path))
    except (SyntaxError, ValueError, RecursionError):
        return
    yield tree
    for module in _imported(tree):
        beside = folder / module.replace(".", "/")
        for candidate in (beside.with_suffix(".py"), beside / "__init__.py"):
            if candidate.is_file():
                yield from _trees(folder, candidate, seen)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a module imports, of a relative import without its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imports_another(tree: ast.Module) -> bool:
    """Tell if a module imports an ArgumentParser that is not argparse's."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "argparse")
    return any(alias.name == PARSER for node in imports for alias in node.names)


def _adds(call: ast.Call, functions: set[str]) -> bool:
    """Tell if a call may add options that no text of the folder has; ``functions`` are defined there."""
    name = _name(call.func)
    if name in PARTLY or re.fullmatch(r"\w+Arg(ument)?Parser|TrlParser", name):
        return True
    if name == PARSER:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return any(word.arg == "parents" for word in call.keywords) or _name(owner) not in ("", "argparse")
    given = (*call.args, *(word.value for word in call.keywords))
    return name not in functions and any("parser" in _name(value).lower() for value in given)


def _name(node: ast.expr | None) -> str:
    """Return the last name of a name or attribute: ``parse_args`` of ``parser.parse_args``; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
