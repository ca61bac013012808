"""Measurements of labctl's workloads on one NVIDIA GPU, and of DeepSpeed-Chat's own script for comparison.

Parts, all but `upstream` by default; each is also a name on the command line:

    card        what labctl's NVIDIA module and sampler read, against nvidia-smi and NVML; kept as fixtures
    WORKLOAD    one of WORKLOADS: the script, launcher and DeepSpeed configuration that a lab uses, for some steps
    upstream    DeepSpeed-Chat's main.py of step 1 with the same batches, in turn with ours (--upstream DIR)

Rows are appended to OUT/rows.jsonl as they come; figures.json and table.md are written at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labctl import fit, launchers
from labctl.model import Workload
from labctl.records import metrics
from labctl.workloads import deepspeed_config, loader

ROOT = Path(__file__).resolve().parents[2]
ALL = 480
"""Seconds for all parts; a part that does not fit into the remaining time is skipped and reported."""
STEPS, WARM_UP = 30, 10
WORKLOADS = {
    "matmul": (),
    "copy-bandwidth": (),
    "allreduce": ("--max-bytes", "256M"),
    "opt-125m": ("--steps", str(STEPS), "--warmup-steps", str(WARM_UP)),
    "opt-350m_bs24_zero0": ("--steps", str(STEPS), "--warmup-steps", str(WARM_UP)),
    "opt-1.3b": ("--steps", str(STEPS), "--warmup-steps", str(WARM_UP)),
}
"""Arguments that keep each part under a minute."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
VOCABULARY = 50265
"""Entries of OPT's tokenizer."""


@dataclass(frozen=True)
class Place:
    """The folder, accelerator and deadline of a measurement."""

    out: Path
    accelerator: str
    toy: bool
    upstream: Path | None
    deadline: float

    @property
    def text(self) -> Path:
        return self.out / "text"

    @property
    def warm_up(self) -> int:
        """Number of untimed steps."""
        return 2 if self.toy else WARM_UP

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def row(self, part: str, **values: object) -> None:
        """Append a row and print it."""
        line = json.dumps({"part": part, **values})
        with (self.out / "rows.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(f"{line}\n")
        print(line, flush=True)


@dataclass(frozen=True)
class Ended:
    """Output of a program: lines with their time in seconds, and the exit code."""

    code: int
    lines: tuple[tuple[float, str], ...]

    @property
    def text(self) -> tuple[str, ...]:
        return tuple(line for _, line in self.lines)

    @property
    def error(self) -> dict[str, str]:
        """Return the line with the reason of a failure, for a row; empty for a program that succeeded."""
        reasons = [line for line in self.text if re.search(r"Error|error:|Killed", line)]
        return {"error": (reasons or [*self.text, ""])[-1][:300]} if self.code else {}

    def rate(self, marker: str, skip: int) -> float:
        """Return lines with the marker per second, from the one after ``skip`` to the last; 0 for fewer than two."""
        times = [second for second, line in self.lines if marker in line][skip:]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def run(argv: Sequence[str], place: Place, log: str, directory: Path, environment: Mapping[str, str] = {}) -> Ended:
    """Run a program and return how it ended; kill its process tree at the deadline; keep its output in ``log``."""
    lines: list[tuple[float, str]] = []
    with (
        (place.out / f"{log}.log").open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            argv,
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        signal.signal(signal.SIGALRM, lambda *_: kill(process.pid))
        signal.alarm(max(int(place.seconds_left()), 1))
        for line in process.stdout or ():
            lines.append((time.monotonic(), line.rstrip()))
            kept.write(line)
        signal.alarm(0)
    return Ended(process.returncode, tuple(lines))


def kill(pid: int) -> None:
    """Kill a process tree: torchrun's ranks are in their own sessions."""
    import psutil

    parent = psutil.Process(pid)
    for process in (*parent.children(recursive=True), parent):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# --- workloads -----------------------------------------------------------------------------------------------


def workload(name: str, accelerator: str) -> Workload:
    """Load a workload as a lab with this accelerator does."""
    read = loader.load(ROOT / "workloads", name, launchers.known())
    return deepspeed_config.resolve_bf16(read, accelerator, ())


# What DeepSpeed starts on a node over ssh; the nodes are {"localhost": [0]} in base64.
DEEPSPEED = (
    *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=eyJsb2NhbGhvc3QiOiBbMF19"),
    *("--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29511"),
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--master-port=29511", "--no-python")


def ranks(launcher: str, program: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the command and the variables that start one rank of a program under a launcher, on this machine."""
    if launcher == "deepspeed":
        return (*DEEPSPEED, "--no_python", "--no_local_rank", *program), {}
    if launcher == "torchrun":
        return (*TORCHRUN, *program), {}
    return tuple(program), ALONE


def ours(name: str, place: Place, log: str) -> tuple[Workload, Ended]:
    """Run a labctl workload with one rank; return it and how it ended."""
    chosen = workload(name, place.accelerator)
    arguments = [*chosen.arguments, *WORKLOADS[name]]
    if place.toy:
        rehearsal = loader.load(ROOT / "workloads", name, launchers.known(), rehearse=True)
        arguments = [*rehearsal.arguments]
    if chosen.deepspeed is not None:
        config = deepspeed_config.complete(
            chosen.deepspeed, ranks=1, accelerator=place.accelerator, where=chosen.declared
        )
        file = place.out / f"{log}.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        arguments += ["--deepspeed_config", str(file), "--data", str(place.text)]
    folder = ROOT / "workloads" / chosen.directory.name
    argv, environment = ranks(chosen.launcher, (sys.executable, "-u", str(folder / chosen.script), *arguments))
    paths = f"{ROOT / 'workloads/common'}:{os.environ.get('PYTHONPATH', '')}"
    return chosen, run(argv, place, log, place.out, {**environment, "PYTHONPATH": paths})


def measure_workload(name: str, place: Place) -> None:
    """Run a workload; add a row with its metrics and, for training, the memory estimated by `labctl fit`."""
    began = time.monotonic()
    chosen, ended = ours(name, place, name)
    sampler = metrics.Sampler(chosen.metrics)
    for line in ended.text:
        sampler.read(line)
    reduced = metrics.reduce_values(chosen.metrics, sampler.values)
    figures = {metric: values.get("value", values.get("last")) for metric, values in reduced.items()}
    expected = fit.of(chosen, place.accelerator, 1, 1) if chosen.memory and not place.toy else None
    if expected:
        needs = fit.report(name, 1, expected, fit.Capacity(device=None, host=None)).required
        figures |= {"fit (GiB)": round(needs.device / 2**30, 3), "fit's phase": needs.device_phase}
    seconds = round(time.monotonic() - began, 1)
    place.row(name, code=ended.code, seconds=seconds, figures=figures, **ended.error)


# --- DeepSpeed-Chat ------------------------------------------------------------------------------------------

PAIRS = {
    "opt-350m_bs24_zero0": ("--dropout", "0.0"),
    "opt-1.3b": ("--gradient_checkpointing",),
}
"""Arguments of each workload by their names in DeepSpeed-Chat's script."""


def measure_upstream(place: Place) -> None:
    """Run upstream's script and ours twice each, in turn, with equal settings; add a row per run, and the ratios."""
    speeds: dict[str, dict[str, list[float]]] = {name: {"theirs": [], "ours": []} for name in PAIRS}
    folders = {name: make_model(name.partition("_")[0], batch_of(name), place) for name in PAIRS}
    for order in (("theirs", "ours"), ("ours", "theirs")):
        for name, whose in ((name, whose) for name in PAIRS for whose in order):
            log = f"{name}-{whose}-{len(speeds[name][whose]) + 1}"
            if place.seconds_left() < 45:
                place.row("upstream", workload=name, whose=whose, code=124, error="not started: no time is left")
                continue
            marker = "Samples/sec" if whose == "theirs" else "loss "
            ended = theirs(name, folders[name], place, log) if whose == "theirs" else ours(name, place, log)[1]
            speed = batch_of(name) * ended.rate(marker, place.warm_up)
            speeds[name][whose] += [speed] * (ended.code == 0)
            figures = {"workload": name, "whose": whose, "samples/s": round(speed, 2)}
            place.row("upstream", code=ended.code, figures=figures, **ended.error)
    for name, measured in speeds.items():
        if all(measured.values()):
            medians = {f"{whose} (samples/s)": round(statistics.median(rates), 2) for whose, rates in measured.items()}
            ratio = round(statistics.median(measured["ours"]) / statistics.median(measured["theirs"]), 3)
            place.row("ratio", figures={"workload": name, **medians, "ours / theirs": ratio})
        shutil.rmtree(folders[name])


def batch_of(name: str) -> int:
    """Return the micro-batch per GPU of a workload's DeepSpeed configuration."""
    config = workload(name, "nvidia").deepspeed
    assert config
    return int(config["train_micro_batch_size_per_gpu"])


def theirs(name: str, model: Path, place: Place, log: str) -> Ended:
    """Run DeepSpeed-Chat's main.py of step 1 with a workload's batch and ZeRO stage; return how it ended."""
    config = workload(name, "nvidia").deepspeed
    assert place.upstream
    assert config
    batch, stage = batch_of(name), config["zero_optimization"]["stage"]
    chat = place.upstream / "applications/DeepSpeed-Chat"
    length = 64 if place.toy else 512
    argv = (
        *DEEPSPEED, str(chat / "training/step1_supervised_finetuning/main.py"),
        "--model_name_or_path", str(model), "--data_path", "local/jsonfile", "--data_split", "10,0,0",
        "--data_output_path", str(model / "cache"), "--per_device_train_batch_size", str(batch),
        "--per_device_eval_batch_size", str(batch), "--max_seq_len", str(length), "--learning_rate", "1e-5",
        "--num_train_epochs", "1", "--gradient_accumulation_steps", "1", "--lr_scheduler_type", "cosine",
        "--num_warmup_steps", "0", "--seed", "1234", "--zero_stage", str(stage), "--dtype", "bf16", "--deepspeed",
        "--print_loss", *PAIRS[name],
    )  # fmt: skip
    # Its data is in a folder beside its package.
    site = os.environ.get("UPSTREAM_SITE", "")
    paths = ":".join((site, str(model / "chat"), os.environ.get("PYTHONPATH", "")))
    shutil.copytree(chat / "dschat", model / "chat/dschat", dirs_exist_ok=True)
    return run(argv, place, log, model, {"PYTHONPATH": paths})


def make_model(name: str, batch: int, place: Place) -> Path:
    """Make a folder with a random model of this shape, a tokenizer, and an epoch's data; RuntimeError if that fails."""
    folder = place.out / name
    shutil.rmtree(folder, ignore_errors=True)
    samples = batch * (6 if place.toy else STEPS)
    for split, count in (("train", samples), ("eval", batch)):
        file = folder / f"chat/data/{split}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = ({"prompt": text, "chosen": text, "rejected": None} for text in sentences(count, 400))
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    shape = ROOT / f"workloads/opt/configs/{name}.json"
    site = f"{os.environ.get('UPSTREAM_SITE', '')}:{os.environ.get('PYTHONPATH', '')}"
    argv = (
        sys.executable,
        str(Path(__file__).with_name("make_model.py")),
        str(shape),
        str(folder),
        *["--toy"] * place.toy,
    )
    made = run(argv, place, f"{name}-made", folder, {"PYTHONPATH": site})
    if made.code:
        raise RuntimeError(made.error["error"])
    return folder


def sentences(count: int, words: int) -> Iterator[str]:
    """Yield ``count`` reproducible texts of random ``w<number>`` words."""
    draw = random.Random(1234)
    for _ in range(count):
        yield " ".join(f"w{draw.randrange(VOCABULARY - 5)}" for _ in range(words))


def write_text(folder: Path) -> None:
    """Write 16 MB of text, enough for every training here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made.txt").write_text("\n".join(sentences(6000, 400)), encoding="utf-8")


# --- all -----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows, with figures and failures, as a Markdown table."""
    lines = ["| what | figures |", "|---|---|"]
    for row in rows:
        figures = row.get("figures") or {
            key: value for key, value in row.items() if key not in ("part", "code", "error")
        }
        text = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
        failed = f" (exit code {row['code']}: {row.get('error', '')})" if row.get("code") else ""
        lines.append(f"| {row['part']} | {text}{failed} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure the parts named in sys.argv, or all; write rows and table to --out; return the number of failed rows."""
    parser = argparse.ArgumentParser(
        "measure.sh",
        description=(__doc__ or "").partition("\n")[0],
        epilog="It needs Python with torch, transformers and accelerate; --wheels DIR adds what wheels.sh has made.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and the table")
    parser.add_argument("--upstream", type=Path, help="a clone of DeepSpeedExamples, to run its main.py beside ours")
    parser.add_argument("--toy", action="store_true", help="tiny models on the CPU: a test of this script")
    parser.add_argument("parts", nargs="*", help=", ".join(("card", *WORKLOADS, "upstream; all unless named")))
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.jsonl").unlink(missing_ok=True)
    accelerator = "cpu" if args.toy else "nvidia"
    upstream = args.upstream.resolve() if args.upstream else None
    place = Place(out, accelerator, args.toy, upstream, time.monotonic() + ALL)
    parts = args.parts or [*(() if args.toy else ("card",)), *WORKLOADS, *(("upstream",) if upstream else ())]
    write_text(place.text)
    for part in parts:
        try:
            if place.seconds_left() < 10:
                place.row(part, code=124, error="not started: no time is left")
            elif part == "card":
                import card

                card.measure(place.out / "card", lambda **values: place.row("card", **values))
            elif part == "upstream":
                measure_upstream(place)
            else:
                measure_workload(part, place)
        except Exception as error:  # noqa: BLE001 - the other parts are measured all the same
            place.row(part, code=1, error=f"{type(error).__name__}: {error}")
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    (out / "figures.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(table(rows), encoding="utf-8")
    shutil.rmtree(place.text)
    print(table(rows))
    return sum(bool(row.get("code")) for row in rows)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
