"""Checkpoints that a later run goes on from: DeepSpeed's own, sharded, with what else decides the next step.

A checkpoint is whole once ``whole.json`` is in it, which is written last and lists the files of all ranks with their
sizes. Each host may hold only what its ranks wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_group import RANK, WORLD, largest, say
from script_exit import InputError

FOLDER, MARKER = "checkpoints", "whole.json"
KEPT = 2
Progress = dict[str, Any]
"""State of a script beside the engines, as JSON."""


class Checkpoints:
    """Checkpoints of engines: saved at regular steps and on SIGTERM, and loaded to resume another run.

    ``facts`` must be the same then as now, as the data. ``adapters_only`` leaves out what is not trained.
    """

    def __init__(
        self, engines: dict[str, Any], args: Namespace, facts: dict[str, str], *, adapters_only: bool = False
    ) -> None:
        """Save every ``args.save_every`` steps and, if that is not 0, on SIGTERM. InputError if it is negative."""
        if args.save_every < 0:
            raise InputError(f"--save-every {args.save_every} is negative")
        self._engines, self._every, self._from = engines, args.save_every, args.resume
        self._facts, self._adapters_only = facts, adapters_only
        self._saved: list[Path] = []
        self._stopping = False
        if self._every:
            signal.signal(signal.SIGTERM, self._stop)

    def load(self, last: int) -> Progress:
        """Restore engines and random state from ``--resume``; return progress, {} without. InputError if unfit.

        ``last`` is the number of the last step.
        """
        if self._from is None:
            return {}
        marker = read_marker(self._from)
        require_same({"ranks": marker["world_size"], **marker["facts"]}, {"ranks": WORLD, **self._facts}, self._from)
        if marker["step"] >= last:
            raise InputError(f"--resume {self._from}: step {marker['step']} is not before the last one, {last}")
        strict = not self._adapters_only
        for name, engine in self._engines.items():
            engine.load_checkpoint(str(self._from), tag=name, load_module_strict=strict)
        set_random_state(self._from / f"random-{RANK}.pt")
        say(f"resumed from {self._from}, after step {marker['step']}")
        progress: Progress = json.loads((self._from / f"progress-{RANK}.json").read_text(encoding="utf-8"))
        return progress

    def after(self, step: int, last: int, progress: Callable[[], Progress]) -> None:
        """Save a checkpoint if one is due after this step; exit after saving if the run is being stopped."""
        if not self._every or step >= last:
            return
        # All ranks save after the same step, whichever was signalled first.
        stopping = largest(float(self._stopping)) > 0
        if stopping or step % self._every == 0:
            self._save(step, progress())
        if stopping:
            os._exit(128 + signal.SIGTERM)

    def _stop(self, *_: object) -> None:
        """Note the SIGTERM, and send further output to the rank's log: the launcher's pipes may close."""
        self._stopping = True
        # What reads this rank's output is ended, too; a line more would be an error.
        run, log = os.environ.get("LABCTL_RUN_DIR"), os.devnull
        with contextlib.suppress(OSError):
            target = os.open(f"{run}/ranks/rank-{RANK}.log" if run else log, os.O_WRONLY | os.O_APPEND)
            os.dup2(target, 1)
            os.dup2(target, 2)

    def _save(self, step: int, progress: Progress) -> None:
        """Write checkpoints/step-N with its marker, all ranks together; remove all but the last KEPT."""
        import torch

        directory = Path(os.environ.get("LABCTL_RUN_DIR", ".")) / FOLDER / f"step-{step}"
        remove(directory)
        torch.distributed.barrier()
        directory.mkdir(parents=True, exist_ok=True)
        save_random_state(directory / f"random-{RANK}.pt")
        (directory / f"progress-{RANK}.json").write_text(json.dumps(progress), encoding="utf-8")
        for name, engine in self._engines.items():
            engine.save_checkpoint(
                str(directory), tag=name, save_latest=False, exclude_frozen_parameters=self._adapters_only
            )
        # Every rank has written its files: save_checkpoint ends with a barrier.
        files: list[dict[str, int]] = [{}] * WORLD
        torch.distributed.all_gather_object(files, sync(directory))
        if RANK == 0:
            together = {name: size for some in files for name, size in some.items()}
            write_marker(
                directory,
                {"step": step, "world_size": WORLD, "facts": self._facts, "files": dict(sorted(together.items()))},
            )
        self._saved.append(directory)
        for old in self._saved[:-KEPT]:
            remove(old)
        del self._saved[:-KEPT]
        say(f"saved {FOLDER}/{directory.name}")


# --- files ---------------------------------------------------------------------------------------------------


def sync(directory: Path) -> dict[str, int]:
    """Flush a directory's files to the disk; return their sizes in bytes by relative path."""
    sizes = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            flush(path)
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes


def write_marker(directory: Path, content: dict[str, Any]) -> None:
    """Write the marker file, atomically, that declares a checkpoint complete."""
    new = directory / f".{MARKER}"
    new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    flush(new)
    new.rename(directory / MARKER)
    flush(directory)


def flush(path: Path) -> None:
    """Flush a file or a directory to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove a checkpoint, its marker first; errors are ignored, as other ranks may remove it too."""
    (directory / MARKER).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def read_marker(directory: Path) -> dict[str, Any]:
    """Read the marker of a complete checkpoint. InputError if it, or a file that it lists, is missing or cut."""
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--resume {directory} is not a complete checkpoint: {MARKER}: {error}") from error
    for name, size in marker["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise InputError(f"--resume {directory} is not a complete checkpoint: {name} is missing or truncated")
    return marker


def require_same(then: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Raise InputError if a fact, such as ranks or data, differs from the checkpoint's."""
    for name, value in now.items():
        if then.get(name) != value:
            raise InputError(f"--resume {directory}: {name} was {then.get(name)}, and is {value}")


# --- random state --------------------------------------------------------------------------------------------


def save_random_state(path: Path) -> None:
    """Write the states of this rank's generators: Python, numpy, torch, and the device."""
    import numpy
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()
    state = (random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device)
    torch.save(state, path)


def set_random_state(path: Path) -> None:
    """Restore the generators' states that ``save_random_state`` wrote."""
    import numpy
    import torch
    from deepspeed.accelerator import get_accelerator

    python, arrays, tensors, device = torch.load(path, map_location="cpu", weights_only=False)
    random.setstate(python)
    numpy.random.set_state(arrays)
    torch.set_rng_state(tensors)
    if device is not None:
        get_accelerator().set_rng_state(device)
