"""check.py SCRIPT ARGUMENT...: what can be told without a Gaudi of an optimum-habana example, a path in PROJECT_PATH.

On every rank: the script is there and is Python, and each of its arguments is one that it, the clone or the installed
transformers declares. Whether it trains, only a Gaudi can tell: the script imports habana_frameworks.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path


def main() -> None:
    """Print options that neither script, clone nor transformers declare; exit with an error for a likely typo."""
    script = Path(os.environ["PROJECT_PATH"]) / sys.argv[1]
    given = [word.partition("=")[0] for word in sys.argv[2:] if word.startswith("--")]
    known = set(declared(script)) | set(of_the_clone(script)) | set(of_transformers())
    unknown = [option for option in given if plain(option) not in known]
    for option in unknown:
        print(f"check: {option} is declared neither by the script, nor by its clone, nor by transformers here")
        if near := get_close_matches(plain(option), known, n=1, cutoff=0.85):
            sys.exit(f"check: {option}: did you mean --{near[0]}?")
    print(f"check: {script} exists; checked {len(given) - len(unknown)} arguments of {len(given)}")
    print("check: only a run on a Gaudi shows whether it trains")


def plain(option: str) -> str:
    """Return an option without leading dashes, ``-`` replaced by ``_``."""
    return option.lstrip("-").replace("-", "_")


def declared(path: Path) -> Iterator[str]:
    """Yield the options that a file declares: annotated fields of its classes, and add_argument calls."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ClassDef):
            yield from (item.target.id for item in node.body
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))  # fmt: skip
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (plain(str(word)) for word in words)


def of_the_clone(script: Path) -> Iterator[str]:
    """Return the options of optimum-habana's training_args.py above the script; none if it is missing."""
    for root in script.parents:
        if (found := root / "optimum/habana/transformers/training_args.py").is_file():
            return declared(found)
    return iter(())


def of_transformers() -> Iterator[str]:
    """Return the options of transformers' training_args.py on sys.path, parsed, not imported; or none."""
    for folder in sys.path:
        if (found := Path(folder) / "transformers/training_args.py").is_file():
            return declared(found)
    return iter(())


if __name__ == "__main__":
    main()
