"""A person's repository for runs of its programs, which write down what they were started with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from support.harness import Lab

WORDS = (
    "a b", "", "$HOME", "'\"", "x;y", "naïve\n(*)", "--steps=3",
    "*", "\\", "a\\nb", "-x", "~", "`id`", "{a,b}", " é\t", "%h", "&&", "#", "!1",
)  # fmt: skip
"""Arguments that a shell on the way would change."""
SAYS = """\
import json, os, sys
from pathlib import Path
from package.words import WORD

shown = {
    "argv": sys.argv[1:],
    "cwd": os.getcwd().rpartition("/work/")[2],
    "rank": os.environ.get("RANK", os.environ.get("NODE_RANK")),
    "world": os.environ.get("WORLD_SIZE", os.environ.get("NNODES")),
    "variable": os.environ.get("TRICKY"),
    "config": Path("configs/a.yaml").read_text(),
    "word": WORD,
}
Path(f"said-{shown['rank'] or 'once'}.json").write_text(json.dumps(shown))
"""


def make(root: Path) -> Path:
    """Make a git repository with programs that write down their arguments, and an ignored folder; return ``root``."""
    files = {
        "package/__init__.py": "",
        "package/words.py": "WORD = 'of the package'\n",
        "package/says.py": SAYS,
        "src/train.py": SAYS,
        "configs/a.yaml": "lr: 0.1\n",
        "tool": "#!/usr/bin/env python\n" + SAYS,
        "data/big.bin": "ignored",
        ".gitignore": "data/\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "tool").chmod(0o755)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def said(lab: Lab, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each process of a run wrote into its copy of the repository; fail if it has the ignored data."""
    work = lab.path / "runs" / result["run_id"] / "work/my repo"
    assert not (work / "data").exists()
    return [json.loads(path.read_text()) for path in sorted(work.glob("said-*.json"))]
