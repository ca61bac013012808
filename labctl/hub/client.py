"""Hugging Face Hub client: the files of a repository, and errors in plain words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from labctl.errors import ConfigError, HostError
from labctl.model import Secret
from labctl.system.files import is_below

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Kind = Literal["model", "dataset"]

HUB = "huggingface/hub"
"""Path of the hub's cache below HOST_CACHE_PATH; in the containers HF_HOME is its ``huggingface``."""
PATIENCE = 10
"""Timeout of a request in seconds."""


class Hub(Struct, frozen=True, kw_only=True):
    """The hub's endpoint, the token, and the local cache (``$HF_HOME/hub``)."""

    endpoint: str
    token: Secret | None
    cache: Path

    @property
    def shown(self) -> str:
        """The endpoint with a password redacted."""
        return re.sub(r"//[^/]*@", "//[REDACTED]@", self.endpoint)

    @property
    def credential(self) -> str | Literal[False]:
        """The token for huggingface_hub; False prevents it from searching for a token itself."""
        return self.token.reveal() if self.token else False

    def folder(self, kind: Kind, name: str) -> Path:
        """Return the cache directory of a repository: ``models--facebook--opt-350m``."""
        return self.cache / f"{kind}s--{name.replace('/', '--')}"


class RemoteFile(Struct, frozen=True):
    """A file of a repository. ``blob``: the SHA-256 of its content if ``large``, else its git object id."""

    path: str
    size: int
    blob: str
    large: bool


class Repository(Struct, frozen=True, kw_only=True):
    """A model or dataset at one revision, the files to fetch, and their cache directory."""

    kind: Kind
    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    folder: Path

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    def link(self, file: RemoteFile) -> Path:
        """Return the path by which workloads read a file."""
        return self.folder / "snapshots" / self.revision / file.path

    def blob(self, file: RemoteFile) -> Path:
        """Return the path of a file's complete content."""
        return self.folder / "blobs" / file.blob

    def partial(self, file: RemoteFile) -> Path:
        """Return the path of a large file's content during its download."""
        return self.folder / "blobs" / f"{file.blob}.incomplete"


class Unreachable(HostError):
    """The hub does not answer."""


def look_up(hub: Hub, kind: Kind, name: str) -> Repository:
    """Look up a repository's current revision and files. HostError if the hub fails, ConfigError for a bad name."""
    from huggingface_hub import HfApi

    with answers(hub, kind, name):
        api = HfApi(endpoint=hub.endpoint, token=hub.credential)
        ask = api.model_info if kind == "model" else api.dataset_info
        info = ask(name, files_metadata=True, timeout=PATIENCE)
    files = tuple(map(_remote_file, info.siblings or ()))
    repository = Repository(kind=kind, name=name, revision=info.sha or "", files=files, folder=hub.folder(kind, name))
    if wrong := impossible(repository):
        raise HostError(
            f"{kind} {name}: the hub at {hub.shown} returned {wrong}",
            hint="if HF_ENDPOINT names a mirror, unset it; then re-run",
        )
    return repository


def _remote_file(listed: RepoSibling) -> RemoteFile:
    """Convert a file of the hub's answer to a RemoteFile."""
    if listed.lfs:
        return RemoteFile(listed.rfilename, listed.size or 0, listed.lfs.sha256, True)
    return RemoteFile(listed.rfilename, listed.size or 0, listed.blob_id or "", False)


def impossible(repository: Repository) -> str:
    """Describe what is invalid in a hub's answer, and may be an attempt to write outside the cache; else empty."""
    if not re.fullmatch(r"[0-9a-f]{40}", repository.revision):
        return f"an invalid revision: {ascii(repository.revision)[:100]}"
    for file in repository.files:
        if not (file.path.isprintable() and file.path and is_below(file.path)):
            return f"a file that cannot be in a repository: {ascii(file.path)[:100]}"
        if not re.fullmatch(r"[0-9a-f]{64}" if file.large else r"[0-9a-f]{40}", file.blob) or file.size < 0:
            return f"an invalid hash or size of {file.path}: {ascii(file.blob)[:100]}, {file.size}"
    return ""


@contextlib.contextmanager
def answers(hub: Hub, kind: Kind, name: str) -> Iterator[None]:
    """Convert errors of huggingface_hub and the disk in the block to ConfigError, Unreachable or another HostError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{kind} `{name}`: {first_line(error)}", hint="write it like facebook/opt-350m") from error
    except HfHubHTTPError as error:
        raise refused(hub, kind, name, error.response.status_code) from error
    except OfflineModeIsEnabled as error:
        raise Unreachable("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", hint="unset them") from error
    except (transport_error(), LocalEntryNotFoundError) as error:
        reason = first_line(error) or type(error).__name__
        raise Unreachable(f"cannot reach the hub at {hub.shown}: {reason}") from error
    except OSError as error:
        raise HostError(
            f"cannot fetch {kind} {name} into {hub.cache}: {error.strerror or first_line(error)}",
            hint=f"df -h {hub.cache}; ls -ld {hub.cache}",
        ) from error


def refused(hub: Hub, kind: Kind, name: str, status: int) -> HostError:
    """Return the error for an HTTP status; the hub answers 401 also for repositories that do not exist."""
    if status not in (401, 403, 404):
        return HostError(f"{kind} {name}: the hub at {hub.shown} answers {status}", hint="re-run later")
    wrong = "permission denied" if status == 403 else "repository not found, or permission denied"
    page = f"{hub.shown}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return HostError(
        f"{kind} {name}: the hub at {hub.shown} answers {status}: {wrong} "
        f"({'HF_TOKEN was sent' if hub.token else 'HF_TOKEN is not set'})",
        hint=f"check the name; if it is private or gated, ask for access at {page} and set HF_TOKEN in .env",
    )


def transport_error() -> type[Exception]:
    """Return the base class of huggingface_hub's HTTP errors, which depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().partition("\n")[0]
