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
"""The image settings that a workload overrode when the lab was brought up; path relative to the lab directory."""
OF_THE_IMAGE = ("LAB_IMAGE", "LAB_PACKAGES", "LAB_APT")
BY_WORKLOAD = "workload "
"""Prefix of the origin of a setting that a workload overrode."""

Showing = Callable[[Callable[[], Progress], float, float], AbstractContextManager[None]]
"""Context manager that displays a run's progress: a function that reads it, the run's age and its time limit in s."""


def unshown(progress: Callable[[], Progress], age: float, limit: float) -> AbstractContextManager[None]:  # noqa: ARG001
    """Return a block that displays no progress."""
    return nullcontext()


class Context(Struct, frozen=True, kw_only=True):
    """Context of a command: lab directory, environment, flags, and receivers of events and progress.

    ``emit`` receives events; ``showing`` displays the progress of a running run.
    """

    directory: Path
    environ: Mapping[str, str]
    emit: Callable[[Event], None]
    flags: Mapping[str, str]
    showing: Showing = unshown

    def settings(self) -> settings.Settings:
        """Return settings with the image that `up` kept, unless changed since; warn. ConfigError if invalid."""
        declared = self.declared()
        for warning in declared.warnings:
            self.warn(warning)
        try:
            kept = json.loads((self.directory / KEPT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return declared
        effective = declared
        for key, (before, value, origin) in kept.items():
            if declared.text(key) == before:
                effective = effective.with_value(key, value, origin)
        return effective

    def keep_image(self, used: Settings) -> None:
        """Write image settings that a workload overrode to the lab, or delete them if none. HostError if it fails."""
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
        """Delete the file with image settings that a workload overrode, if it exists."""
        (self.directory / KEPT).unlink(missing_ok=True)

    def declared(self) -> Settings:
        """Load flags, environment and .env; add LAB_REQUIREMENTS to LAB_PACKAGES, make LAB_DOCKERFILE absolute."""
        loaded = self._with_requirements(settings.load(self.directory, self.environ, self.flags))
        if name := loaded.text("LAB_DOCKERFILE"):
            path = self.directory.absolute() / Path(name).expanduser()
            return loaded.with_value("LAB_DOCKERFILE", str(path), loaded.origin("LAB_DOCKERFILE"))
        return loaded

    def _with_requirements(self, loaded: Settings) -> Settings:
        """Return the settings with the packages of LAB_REQUIREMENTS added to LAB_PACKAGES."""
        name = loaded.text("LAB_REQUIREMENTS")
        if not name:
            return loaded
        path, origin = self.directory / Path(name).expanduser(), loaded.origin("LAB_REQUIREMENTS")
        packages = (*loaded.text("LAB_PACKAGES").split(), *requirements.read(path, f"LAB_REQUIREMENTS ({origin})"))
        return loaded.with_value("LAB_PACKAGES", " ".join(packages), origin)

    def warn(self, text: str) -> None:
        """Emit a warning event."""
        self.emit(Event(kind="warning", text=text))

    def notice(self, text: str) -> None:
        """Emit a notice event."""
        self.emit(Event(kind="notice", text=text))

    def waits(self, text: str) -> None:
        """Emit a waiting event."""
        self.emit(Event(kind="waiting", text=text))

    def line(self, text: str) -> None:
        """Emit a line event with a line that a program printed."""
        self.lines((text,))

    def lines(self, texts: Iterable[str]) -> None:
        """Emit lines that a program printed together, as one event."""
        self.emit(Event(kind="line", text="\n".join(texts)))


def find_lab(directory: Path, environ: Mapping[str, str]) -> Path:
    """Return the nearest directory upwards with LAB_NAME in .env, else ``directory``. ConfigError if not the user's.

    Code below a lab directory may have a .env of its own. ConfigError for a .env that others own: in a
    directory that others can write to, it would decide on which hosts and in which containers a command runs.
    """
    for folder in (directory, *directory.parents):
        if is_lab(folder):
            _require_own(folder / ".env", environ)
            return folder
    return directory


OWN = (".env", ".lab", ".devcontainer", "runs")
"""Files and folders of labctl in a lab directory, which are not copied into a run."""


def is_lab(directory: Path) -> bool:
    """Tell if a directory has a readable .env that sets LAB_NAME."""
    dotenv = directory / ".env"
    try:
        text = dotenv.read_text(encoding="utf-8-sig", errors="replace") if dotenv.is_file() else ""
    except OSError:
        return False
    return bool(re.search(r"^\s*(export\s+)?LAB_NAME\s*=", text, re.MULTILINE))


def _require_own(file: Path, environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless the caller, root or the user behind sudo owns the file, and the link to it."""
    caller = os.geteuid()
    trusted = ("0", str(caller), environ.get("SUDO_UID") if caller == 0 else None)
    if others := [uid for uid in (file.lstat().st_uid, file.stat().st_uid) if str(uid) not in trusted]:
        folder = shlex.quote(str(file.parent))
        raise ConfigError(
            f"{file} belongs to {_user(others[0])}, and you are {_user(caller)}",
            hint=f"if you trust them: name the lab with -C {folder}; if it is yours: chown {caller} {folder}/.env",
        )


def _user(uid: int) -> str:
    """Return a user's name and uid for a message, or the uid alone if it has no name."""
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def require_initialised(context: Context) -> None:
    """Raise ConfigError unless the context's directory has a .env."""
    if not (context.directory / ".env").exists():
        raise _no_lab(context)


def is_named(context: Context, settings: Settings) -> bool:
    """Tell if LAB_NAME is set or the directory has a .env."""
    return settings.origin("LAB_NAME") != "default" or (context.directory / ".env").exists()


def require_named(context: Context, settings: Settings) -> None:
    """Raise ConfigError unless LAB_NAME is set or the directory has a .env."""
    if not is_named(context, settings):
        raise _no_lab(context)


def _no_lab(context: Context) -> ConfigError:
    """Return a ConfigError, not raised, about a directory without .env."""
    hint = "cd into the lab's directory, or name it: -C DIRECTORY; `labctl init mylab` creates one"
    return ConfigError(f"{context.directory} is not a lab directory (no .env)", hint=hint)
