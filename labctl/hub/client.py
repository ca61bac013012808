"""The Hugging Face hub as a person reaches it: what a repository holds, and why it cannot be had."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labctl.errors import ConfigError, HostError
from labctl.model import Secret

Kind = Literal["model", "dataset"]

PATIENCE = 10
"""Seconds that the hub may stay silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where the hub is, and the directory of its library's cache here (``$HF_HOME/hub``)."""

    endpoint: str
    token: Secret | None
    cache: Path

    @property
    def shown(self) -> str:
        """The endpoint without a password that it may hold."""
        return re.sub(r"//[^/]*@", "//[REDACTED]@", self.endpoint)

    @property
    def credential(self) -> str | Literal[False]:
        """What the library takes; without a token it must not look for one of its own."""
        return self.token.reveal() if self.token else False

    def folder(self, kind: Kind, name: str) -> Path:
        """Where the library keeps a repository: ``models--facebook--opt-350m``."""
        return self.cache / f"{kind}s--{name.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. ``blob`` names its content: SHA-256 where it is ``large``, else its git object."""

    path: str
    size: int
    blob: str
    large: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A model or dataset at one revision, those of its files that are wanted, and where they are kept."""

    kind: Kind
    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    folder: Path

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files)

    def link(self, file: RemoteFile) -> Path:
        """Where workloads read a file."""
        return self.folder / "snapshots" / self.revision / file.path

    def blob(self, file: RemoteFile) -> Path:
        """Where a file's content is, whole."""
        return self.folder / "blobs" / file.blob

    def partial(self, file: RemoteFile) -> Path:
        """Where a large file's content grows."""
        return self.folder / "blobs" / f"{file.blob}.incomplete"


class Unreachable(HostError):
    """No answer from the hub: no network, a wrong address, a proxy in between."""


def look_up(hub: Hub, kind: Kind, name: str) -> Repository:
    """The repository as the hub has it now. HostError where it refuses or is not reached."""
    from huggingface_hub import HfApi

    with answers(hub, kind, name):
        api = HfApi(endpoint=hub.endpoint, token=hub.credential)
        ask = api.model_info if kind == "model" else api.dataset_info
        found = ask(name, files_metadata=True, timeout=PATIENCE)
    files = tuple(
        RemoteFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else one.blob_id or "", bool(one.lfs))
        for one in found.siblings or ()
    )
    return Repository(kind=kind, name=name, revision=found.sha or "", files=files, folder=hub.folder(kind, name))


@contextlib.contextmanager
def answers(hub: Hub, kind: Kind, name: str) -> Iterator[None]:
    """The library's failures in this block, as people are told them."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{kind} `{name}`: {first_line(error)}", hint="write it like facebook/opt-350m") from error
    except HfHubHTTPError as error:
        raise refused(hub, kind, name, error.response.status_code) from error
    except OfflineModeIsEnabled as error:
        what = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub was not asked"
        raise Unreachable(what, hint="unset them") from error
    except (transport_error(), LocalEntryNotFoundError) as error:
        reason = first_line(error) or type(error).__name__
        raise Unreachable(f"cannot reach the hub at {hub.shown}: {reason}") from error
    except OSError as error:
        raise HostError(
            f"cannot fetch {kind} {name} into {hub.cache}: {error.strerror or first_line(error)}",
            hint=f"df -h {hub.cache}; ls -ld {hub.cache}",
        ) from error


def refused(hub: Hub, kind: Kind, name: str, status: int) -> HostError:
    """What an HTTP status means for a person; the hub says 401 of what is not there, too."""
    if status not in (401, 403, 404):
        return HostError(f"{kind} {name}: the hub at {hub.shown} answers {status}", hint="the same command later")
    wrong = "it is not open to you" if status == 403 else "there is no such repository, or it is not open to you"
    page = f"{hub.shown}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return HostError(
        f"{kind} {name}: the hub at {hub.shown} answers {status}: {wrong} "
        f"({'HF_TOKEN was sent' if hub.token else 'HF_TOKEN is not set'})",
        hint=f"check the name; if it is private or gated, ask for access at {page} and set HF_TOKEN in .env",
    )


def transport_error() -> type[Exception]:
    """The base of every failure of the library's HTTP client, which is not the same in all its versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
