"""Download repositories from the hub, in a pod with the lab's claim; arguments are ``model:NAME`` or ``dataset:NAME``.

Print one JSON line per repository; an error goes to stderr as one sentence.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Weights in other formats than safetensors.
OTHER_FORMATS = ["*.bin", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "*.gguf"]


def fetch(kind: str, name: str) -> dict[str, object]:
    """Download a repository, without other weights if it has safetensors; link a model; return its report."""
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().list_repo_files(name, repo_type=kind)
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    ignored = OTHER_FORMATS if has_safetensors else []
    folder = Path(snapshot_download(name, repo_type=kind, ignore_patterns=ignored))
    if kind == "model":
        link(folder, Path(os.environ["LABCTL_STORAGE"], "models", name))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"kind": kind, "name": name, "revision": folder.name, "bytes": size}


def link(folder: Path, path: Path) -> None:
    """Make the path a relative symbolic link to a model's directory, in place of an earlier link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(folder, path.parent))


def main() -> None:
    """Fetch each repository of the arguments and print its report; exit with one sentence at the first error."""
    from huggingface_hub import errors

    for repository in sys.argv[1:]:
        kind, _, name = repository.partition(":")
        try:
            sys.stdout.write(json.dumps(fetch(kind, name)) + "\n")
        except errors.GatedRepoError:
            sys.exit(f"{kind} {name} is gated: accept its terms on its page at the hub, and set HF_TOKEN in .env")
        except errors.RepositoryNotFoundError:
            sys.exit(f"{kind} {name} not found, or private: set HF_TOKEN in .env to a token that may read it")
        except (OSError, ValueError, errors.HfHubHTTPError) as error:
            refused = getattr(getattr(error, "response", None), "status_code", 0) in (401, 403)
            first, _, _ = str(error).partition("\n")
            hint = "; set HF_TOKEN in .env to a token that may read it" if refused else ""
            sys.exit(f"{kind} {name}: {first}{hint}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
