"""`make bench`: labctl against the raw tools, interleaved A B A B, median of seven; a table, and bench.json.

Each pair does the same work: the same compose files, the same launch command, the same two ranks in the same
containers. What each goal compares is said in its row. Needs the image; makes and removes labs of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LABCTL = str(Path(sys.executable).parent / "labctl")
WORKLOADS = Path(__file__).parent / "workloads"
Timed = Callable[[], float]


def main() -> None:
    """Run the chosen benchmarks, write the results to --out as JSON, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each side, after one that is not")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    rows = []
    for name, goal, bench in BENCHMARKS:
        if options.only in name:
            say(f"{name} ...")
            rows.append({"name": name, "goal": goal, **bench(options.runs)})
            say(f"  {line(rows[-1])}")
    document = {"schema": 1, "runs": options.runs, "cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    sys.stdout.write("\n".join([line(row) for row in rows]) + "\n")


def line(row: dict[str, Any]) -> str:
    """Render a benchmark's result as a line of text."""
    verdict = "met" if row["met"] else "MISSED"
    return (
        f"{row['name']:<34} {row['labctl']:>9.3f} {row['raw']:>9.3f} {row['unit']:<10}"
        f" {row['ratio']:>6.3f} (goal {row['goal']:g}, {verdict}; {row['low']:.3f} to {row['high']:.3f})"
        + (f", peak memory {row['peak']:.0f} MiB" if "peak" in row else "")
    )


# --- the pairs -----------------------------------------------------------------------------------------------


def help_text(runs: int) -> dict[str, Any]:
    """Compare `labctl --help` with `docker compose version`."""
    return compare(runs, lambda: seconds([LABCTL, "--help"]), lambda: seconds(["docker", "compose", "version"]), 1.5)


def up(nodes: int, goal: float) -> Callable[[int], dict[str, Any]]:
    """Return a function that compares a first `labctl up` with `docker compose up -d` of the same files."""

    def bench(runs: int) -> dict[str, Any]:
        with lab(nodes) as here:
            raw = compose(here)
            return compare(runs, lambda: after_down(here, [LABCTL, "up"]), lambda: after_down(here, raw), goal)

    return bench


def repeated_up(nodes: int, goal: float) -> Callable[[int], dict[str, Any]]:
    """Return a function that compares `labctl up` and `docker compose up -d` of a lab that is up already."""

    def bench(runs: int) -> dict[str, Any]:
        """Bring a lab up, then compare both commands on it."""
        with lab(nodes) as here:
            raw = compose(here)
            seconds(raw, here)
            return compare(runs, lambda: seconds([LABCTL, "up"], here), lambda: seconds(raw, here), goal)

    return bench


def first_rank(runs: int) -> dict[str, Any]:
    """Compare the time to the first rank's line of `labctl run` with its command typed in the launcher."""
    with lab(2) as here:
        shutil.copytree(WORKLOADS, here / "workloads", dirs_exist_ok=True)
        seconds([LABCTL, "run", "hello"], here)
        run = latest(here)
        argv = json.loads((run / "job.json").read_text())["argv"]
        typed = [*enter(here, "launcher", f"/workspace/outputs/{run.name}"), *argv]
        shutil.copytree(run, here / "runs/.outputs" / run.name)
        pattern = "labctl: rank"
        return compare(
            runs, lambda: until([LABCTL, "run", "hello"], pattern, here), lambda: until(typed, pattern, here), 1.05
        )


def throughput(runs: int) -> dict[str, Any]:
    """Compare opt-tiny's samples/s in a run and with the same two ranks started by hand. Higher is better."""
    with lab(2) as here:
        seconds([LABCTL, "run", "opt-tiny"], here)
        run = latest(here)
        script = json.loads((run / "job.json").read_text())["rank_argv"]
        # Where the ranks look for DeepSpeed's configuration.
        shutil.copytree(run, here / "runs/.outputs" / run.name)

        def in_lab() -> float:
            """Run opt-tiny with labctl; return its samples per second."""
            done = capture([LABCTL, "run", "opt-tiny", "--json"], here)
            return float(json.loads(done)["metrics"]["throughput"]["value"])

        def by_hand() -> float:
            """Start opt-tiny's two ranks by `docker exec`; return rank 0's samples per second."""
            ranks = [start_rank(here, rank, script) for rank in (0, 1)]
            out, _ = ranks[0].communicate(timeout=600)
            ranks[1].wait(timeout=60)
            match = re.search(r"Throughput: (\S+) samples/sec", out)
            assert match, out
            return float(match[1])

        return compare(runs, in_lab, by_hand, 0.99, unit="samples/s", more_is_better=True)


def start_rank(here: Path, rank: int, script: list[str]) -> subprocess.Popen[str]:
    """Start a rank of the script in worker-RANK by `docker exec`; return the process, its output a pipe."""
    environment: dict[str, str | int] = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    environment |= {"MASTER_ADDR": "worker-0", "MASTER_PORT": 29600, "CROSS_RANK": rank, "CROSS_SIZE": 2}
    environment["PYTHONPATH"] = "/workspace/workloads/common"
    settings = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
    command = enter(here, f"worker-{rank}", "/workspace/workloads/opt", settings)
    return subprocess.Popen([*command, "python", "-u", *script], stdout=subprocess.PIPE, text=True)


def rendering(runs: int) -> dict[str, Any]:
    """Compare rendering one lab of 10,000 nodes with rendering ten of 1,000, in seconds."""
    from support.builders import lab as build_lab

    from labctl.backends.docker.compose import render

    def timed(count: int, times: int) -> float:
        """Return the seconds that rendering ``times`` labs of ``count`` nodes takes."""
        labs = [build_lab(nodes=count) for _ in range(times)]
        began = time.perf_counter()
        for directory in labs:
            assert len(render.render(directory)) == count + 1
        return time.perf_counter() - began

    return compare(runs, lambda: timed(10_000, 1), lambda: timed(1_000, 10), 1.1)


def fan_out(nodes: int, goal: float) -> Callable[[int], dict[str, Any]]:
    """Return a function that compares `labctl exec --all -- true` with pdsh in the launcher."""

    def bench(runs: int) -> dict[str, Any]:
        """Compare both commands in a lab that is up."""
        with lab(nodes) as here:
            typed = ["pdsh", "-S", "-R", "ssh", "-f", str(nodes), "-w", f"worker-[0-{nodes - 1}]", "true"]
            raw = [*enter(here, "launcher", "/workspace"), *typed]
            ours = [LABCTL, "exec", "--all", "--", "true"]
            return compare(runs, lambda: seconds(ours, here), lambda: seconds(raw, here), goal)

    return bench


def planned(nodes: int, limit: float, *command: str) -> Callable[[int], dict[str, Any]]:
    """Return a function that compares a dry run's time with ``limit`` seconds and measures its peak memory."""

    def bench(runs: int) -> dict[str, Any]:
        """Compare the dry run's seconds with ``limit``; add its peak memory as ``peak``."""
        peaks: list[float] = []
        argv = [LABCTL, *command, "--dry-run", "--setting", f"LAB_NODES={nodes}"]
        with initialised() as here:
            return compare(runs, lambda: with_peak(argv, here, peaks), lambda: limit, 1.0) | {"peak": max(peaks)}

    return bench


def with_peak(argv: list[str], here: Path, peaks: list[float]) -> float:
    """Run a command; return its seconds, and append its peak memory in MiB to ``peaks``; exit if it fails."""
    began = time.perf_counter()
    child = subprocess.Popen(argv, cwd=here, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(argv)} ended with {child.returncode}")
    peaks.append(used.ru_maxrss / 1024)
    return time.perf_counter() - began


def rendering_hosts(runs: int) -> dict[str, Any]:
    """Compare rendering 1,000 nodes on a host each with two seconds."""
    from support.builders import host, node
    from support.builders import lab as build_lab

    from labctl.backends.docker.compose import render

    names = [f"host-{number}" for number in range(1_000)]
    hosts = tuple(host(name=name, address=f"10.0.{number >> 8}.{number & 255}") for number, name in enumerate(names))
    nodes = tuple(node(number, host=name) for number, name in enumerate(names))

    def timed() -> float:
        """Return the seconds that rendering takes."""
        began = time.perf_counter()
        assert len(render.render(build_lab(nodes, hosts=hosts, network="host"))) == len(names) + 1
        return time.perf_counter() - began

    return compare(runs, timed, lambda: 2.0, 1.0)


def evaluating(size: int) -> Callable[[int], dict[str, Any]]:
    """Return a function that compares `labctl eval` of 10,000 logs of ``size`` bytes with grep over them."""
    from support.logs import write_logs

    def bench(runs: int) -> dict[str, Any]:
        """Write 10,000 logs into a temporary folder and compare both commands on them."""
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            here = Path(name)
            write_logs(here, 10_000, size)
            raw = ["sh", "-c", "grep -h Throughput *.log > /dev/null"]
            return compare(runs, lambda: seconds([LABCTL, "eval", "."], here), lambda: seconds(raw, here), 2.0)

    return bench


BENCHMARKS: list[tuple[str, float, Callable[[int], dict[str, Any]]]] = [
    ("labctl --help", 1.5, help_text),
    ("render 10,000 nodes", 1.1, rendering),
    *[(f"up, {nodes} nodes", 1.10, up(nodes, 1.10)) for nodes in (2, 8, 32)],
    *[(f"repeated up, {nodes} nodes", 1.0, repeated_up(nodes, 1.0)) for nodes in (2, 8, 32)],
    ("up --dry-run, 128 nodes / 2 s", 1.0, planned(128, 2.0, "up")),
    ("up --dry-run, 1,000 nodes / 5 s", 1.0, planned(1_000, 5.0, "up")),
    ("run --dry-run, 128 nodes / 2 s", 1.0, planned(128, 2.0, "run", "hello-mpi")),
    ("run --dry-run, 1,000 nodes / 5 s", 1.0, planned(1_000, 5.0, "run", "hello-mpi")),
    ("render 1,000 hosts / 2 s", 1.0, rendering_hosts),
    ("eval, 10,000 logs of 100 KiB / grep", 2.0, evaluating(100 << 10)),
    ("eval, 10,000 logs of 1 MiB / grep", 2.0, evaluating(1 << 20)),
    ("true on 100 nodes / pdsh -f 100", 1.2, fan_out(100, 1.2)),
    ("run to the first rank's line", 1.05, first_rank),
    ("opt-tiny throughput", 0.99, throughput),
]


# --- measuring -----------------------------------------------------------------------------------------------


def compare(
    runs: int, ours: Timed, raw: Timed, goal: float, *, unit: str = "s", more_is_better: bool = False
) -> dict[str, Any]:
    """Measure both by turns, after a warm-up; return medians, ratio with its range, and if it meets ``goal``."""
    pairs = []
    for turn in range(runs + 1):
        pair = ours(), raw()
        say(f"    {turn}: {pair[0]:.3f} {pair[1]:.3f}")
        pairs.append(pair)
    ratios = [a / b for a, b in pairs[1:]]
    ratio = statistics.median(ratios)
    return {
        "labctl": statistics.median(a for a, _ in pairs[1:]),
        "raw": statistics.median(b for _, b in pairs[1:]),
        "unit": unit,
        "ratio": ratio,
        "low": min(ratios),
        "high": max(ratios),
        "met": ratio >= goal if more_is_better else ratio <= goal,
        "pairs": pairs[1:],
    }


def seconds(argv: list[str], here: Path | None = None) -> float:
    """Run a command to its end; return the seconds. Exit if it fails."""
    began = time.perf_counter()
    capture(argv, here)
    return time.perf_counter() - began


def capture(argv: list[str], here: Path | None = None) -> str:
    """Run a command; return its standard output. Exit with its output if it fails."""
    done = subprocess.run(argv, cwd=here, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def after_down(here: Path, argv: list[str]) -> float:
    """Take the lab down, then run a command; return the command's seconds."""
    capture([LABCTL, "down"], here)
    return seconds(argv, here)


def until(argv: list[str], pattern: str, here: Path) -> float:
    """Return the seconds until a command prints ``pattern``, after it has ended. Exit if it never does."""
    began = time.perf_counter()
    child = subprocess.Popen(argv, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout
    for text in child.stdout:
        if pattern in text:
            elapsed = time.perf_counter() - began
            child.communicate(timeout=120)
            return elapsed
    sys.exit(f"{' '.join(argv)} never printed `{pattern}`")


# --- labs ----------------------------------------------------------------------------------------------------


@contextmanager
def lab(nodes: int) -> Iterator[Path]:
    """Provide a new lab directory with ``nodes`` nodes up; take it down and remove it afterwards."""
    with initialised() as here:
        env = here / ".env"
        env.write_text(re.sub(r"^LAB_NODES=.*$", f"LAB_NODES={nodes}", env.read_text(), flags=re.MULTILINE))
        try:
            capture([LABCTL, "up"], here)
            yield here
        finally:
            capture([LABCTL, "down"], here)


@contextmanager
def initialised() -> Iterator[Path]:
    """Provide a new lab directory by `labctl init`; remove it afterwards."""
    here = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        capture([LABCTL, "init", str(here)])
        yield here
    finally:
        shutil.rmtree(here)


def compose(here: Path) -> list[str]:
    """Return the `docker compose up --detach` command of all compose files of a lab's nodes."""
    files = sorted((here / ".lab/nodes").glob("*/compose.yml"), key=lambda path: int(path.parent.name.split("-")[1]))
    return ["docker", "compose", *[word for path in files for word in ("-f", str(path))], "up", "--detach"]


def enter(here: Path, node: str, directory: str, more: list[str] | None = None) -> list[str]:
    """Return the `docker exec` command into a node's container, in a directory, as this user."""
    name = re.search(r"^LAB_NAME=(.*)$", (here / ".env").read_text(), flags=re.MULTILINE)
    assert name
    user = f"{os.getuid()}:{os.getgid()}"
    return ["docker", "exec", "--user", user, "--workdir", directory, *(more or []), f"labctl-{name[1]}-{node}-1"]


def latest(here: Path) -> Path:
    """Return the directory of the lab's last run."""
    return max((here / "runs").glob("2*"))


def say(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
