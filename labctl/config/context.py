"""The context of a command: lab directory, environment, flags that override settings, and progress."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec import Struct

from labctl.config import requirements, settings
from labctl.config.settings import Settings
from labctl.errors import ConfigError
from labctl.model import Event, Progress
from labctl.system import files

KEPT = ".lab/image.json"
"""What a workload has made of the settings of the lab's image, relative to the lab directory."""
OF_THE_IMAGE = ("LAB_IMAGE", "LAB_PACKAGES", "LAB_APT")
BY_WORKLOAD = "workload "
"""How the origin of such a setting begins."""

Showing = Callable[[Callable[[], Progress], float, float], AbstractContextManager[None]]
"""Shows how far a run is for the time of a block: what tells it, the run's age and its time limit in seconds."""


def unshown(progress: Callable[[], Progress], age: float, limit: float) -> AbstractContextManager[None]:  # noqa: ARG001
    return nullcontext()


class Context(Struct, frozen=True, kw_only=True):
    """What the command line passes to a flow; ``emit`` receives progress, ``showing`` that of a run under way."""

    directory: Path
    environ: Mapping[str, str]
    emit: Callable[[Event], None]
    flags: Mapping[str, str]
    showing: Showing = unshown

    def settings(self) -> settings.Settings:
        """The effective settings; emits their warnings. ConfigError with ``file:line``.

        With the image of a workload that the lab was brought up for, unless they name another since.
        """
        declared = self.declared()
        for warning in declared.warnings:
            self.warn(warning)
        try:
            kept = json.loads((self.directory / KEPT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return declared
        found = declared
        for key, (before, value, origin) in kept.items():
            if declared.text(key) == before:
                found = found.with_value(key, value, origin)
        return found

    def keep_image(self, used: Settings) -> None:
        """Have the lab's later commands expect what a workload's settings have made of its image. HostError."""
        declared = self.declared()
        kept = {
            key: (declared.text(key), used.text(key), used.origin(key))
            for key in OF_THE_IMAGE
            if used.origin(key).startswith(BY_WORKLOAD)
        }
        if kept:
            files.write(self.directory / KEPT, json.dumps(kept))
        else:
            self.forget_image()

    def forget_image(self) -> None:
        (self.directory / KEPT).unlink(missing_ok=True)

    def declared(self) -> Settings:
        """The settings of flags, environment and .env alone. ConfigError with ``file:line``."""
        loaded = self._with_requirements(settings.load(self.directory, self.environ, self.flags))
        if name := loaded.text("LAB_DOCKERFILE"):
            path = self.directory.absolute() / Path(name).expanduser()
            return loaded.with_value("LAB_DOCKERFILE", str(path), loaded.origin("LAB_DOCKERFILE"))
        return loaded

    def _with_requirements(self, loaded: Settings) -> Settings:
        """The settings with the packages of LAB_REQUIREMENTS among those of LAB_PACKAGES."""
        name = loaded.text("LAB_REQUIREMENTS")
        if not name:
            return loaded
        path, origin = self.directory / Path(name).expanduser(), loaded.origin("LAB_REQUIREMENTS")
        wanted = (*loaded.text("LAB_PACKAGES").split(), *requirements.read(path, f"LAB_REQUIREMENTS ({origin})"))
        return loaded.with_value("LAB_PACKAGES", " ".join(wanted), origin)

    def warn(self, text: str) -> None:
        self.emit(Event(kind="warning", text=text))

    def notice(self, text: str) -> None:
        self.emit(Event(kind="notice", text=text))

    def waits(self, text: str) -> None:
        self.emit(Event(kind="waiting", text=text))

    def line(self, text: str) -> None:
        self.lines((text,))

    def lines(self, texts: Iterable[str]) -> None:
        """What a program has printed at once."""
        self.emit(Event(kind="line", text="\n".join(texts)))


def find_lab(directory: Path, environ: Mapping[str, str]) -> Path:
    """The nearest directory upwards whose .env sets LAB_NAME, else the directory itself.

    Code below a lab directory may have a .env of its own. ConfigError if the lab's is somebody else's: in a directory
    where others write, it would say on which hosts and in which containers a command runs.
    """
    for one in (directory, *directory.parents):
        if is_lab(one):
            _require_own(one / ".env", environ)
            return one
    return directory


def is_lab(directory: Path) -> bool:
    """Whether a directory has a .env that can be read and sets LAB_NAME."""
    file = directory / ".env"
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return False
    return bool(re.search(r"^\s*(export\s+)?LAB_NAME\s*=", text, re.MULTILINE))


def _require_own(file: Path, environ: Mapping[str, str]) -> None:
    """ConfigError if neither the caller, root, nor who called sudo owns the file, or the link to it."""
    caller = os.geteuid()
    trusted = ("0", str(caller), environ.get("SUDO_UID") if caller == 0 else None)
    if others := [uid for uid in (file.lstat().st_uid, file.stat().st_uid) if str(uid) not in trusted]:
        folder = shlex.quote(str(file.parent))
        raise ConfigError(
            f"{file} belongs to {_user(others[0])}, and you are {_user(caller)}",
            hint=f"if you trust them: name the lab with -C {folder}; if it is yours: chown {caller} {folder}/.env",
        )


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def require_initialised(context: Context) -> None:
    """ConfigError if a directory has no .env: `up` there would create folders that the user did not ask for."""
    if not (context.directory / ".env").exists():
        raise ConfigError(f"{context.directory} has no .env", hint=f"labctl init {shlex.quote(str(context.directory))}")


def require_named(context: Context, settings: Settings) -> None:
    """ConfigError if neither a .env nor a setting names the lab: the default name would be another lab's."""
    if settings.origin("LAB_NAME") == "default" and not (context.directory / ".env").exists():
        hint = "cd into the lab's directory, or name it: -C DIRECTORY; `labctl init DIRECTORY` creates one"
        raise ConfigError(f"{context.directory} is not a lab directory (no .env)", hint=hint)
