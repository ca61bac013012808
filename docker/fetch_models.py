"""Runs in a pod that has the lab's claim: downloads from the hub what its arguments name, as ``model:NAME``.

It prints a line of JSON for each repository; what the hub refuses goes to standard error, in words.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Weights in other forms than the preferred one.
OTHERS = ["*.bin", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "*.gguf"]


def fetch(kind: str, name: str) -> dict[str, object]:
    """Download a repository, without weights in other forms where it has safetensors."""
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().list_repo_files(name, repo_type=kind)
    ignored = OTHERS if any(one.endswith(".safetensors") for one in files) else []
    folder = Path(snapshot_download(name, repo_type=kind, ignore_patterns=ignored))
    if kind == "model":
        link(folder, Path(os.environ["LABCTL_STORAGE"], "models", name))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"kind": kind, "name": name, "revision": folder.name, "bytes": size}


def link(folder: Path, place: Path) -> None:
    """Have a model found by its name, whatever its revision."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(folder, place.parent))


def main() -> None:
    from huggingface_hub import errors

    for word in sys.argv[1:]:
        kind, _, name = word.partition(":")
        try:
            sys.stdout.write(json.dumps(fetch(kind, name)) + "\n")
        except errors.GatedRepoError:
            sys.exit(f"{kind} {name} is gated: accept its terms on its page at the hub, and set HF_TOKEN in .env")
        except errors.RepositoryNotFoundError:
            sys.exit(f"{kind} {name} not found, or it is private: HF_TOKEN in .env is a token that may read it")
        except (OSError, ValueError, errors.HfHubHTTPError) as error:
            refused = getattr(getattr(error, "response", None), "status_code", 0) in (401, 403)
            first, _, _ = str(error).partition("\n")
            hint = "; HF_TOKEN in .env is a token that may read it" if refused else ""
            sys.exit(f"{kind} {name}: {first}{hint}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
