"""Dry runs compared with the actual commands, on a lab that does not exist yet."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

# Locks name the current command and are not part of a lab.
LOCKS = {".lab/lock"}


def made(lab: Lab) -> dict[str, str]:
    """Return path -> content as hex of all files in .lab and runs, except the lock."""
    files = (path for folder in (".lab", "runs") for path in (lab.path / folder).rglob("*") if path.is_file())
    names = {str(path.relative_to(lab.path)): path for path in files}
    return {name: path.read_bytes().hex() for name, path in names.items() if name not in LOCKS}


def planned(lab: Lab, *arguments: str) -> list[str]:
    """Return the steps of a dry run; assert that it changes no file, container, network or volume."""
    before = made(lab), lab.labelled(), lab.identities()
    plan: list[str] = lab.call(*arguments, "--dry-run", "--json").expect(0).json["plan"]
    assert (made(lab), lab.labelled(), lab.identities()) == before
    return plan


def carried_out(err: str) -> list[str]:
    """List the steps `[N/M] ...` of a command's stderr, which are cut to the screen's width."""
    return [line.partition("] ")[2].removesuffix("...") for line in err.splitlines() if re.match(r"\[\d+/\d+\] ", line)]


def texts(plan: list[str]) -> list[str]:
    """Return the steps of a plan without their number and reason."""
    return [line.partition(" ")[2].rpartition("  [")[0] for line in plan]


def written(plan: list[str]) -> set[str]:
    """Return the paths that the `write` steps of a plan name; those of a run begin with its directory."""
    paths: set[str] = set()
    for text in texts(plan):
        _, writes, names = text.partition("write ")
        for part in names.split(", and ") if writes else ():
            names, _, run = part.partition(" to ")
            paths |= {f"{run}/{name}" if run else name for name in names.split(", ")}
    return paths


def same_steps(plan: list[str], err: str) -> None:
    """Assert that stderr announces the plan's steps in order, compared by 60 characters without run ids."""
    run = re.compile(r"\d{8}-\d{6}-([\w-]+)-[0-9a-f]{6}\b")
    steps = [run.sub(r"\1", text) for text in texts(plan)]
    announced = [run.sub(r"\1", text) for text in carried_out(err)]
    assert len(announced) == len(steps), err
    for step, text in zip(steps, announced, strict=True):
        assert step.startswith(text[:60])


@pytest.mark.smoke
def test_plan_and_deed_of_a_lab_from_nothing_to_nothing(fresh_lab: Callable[..., Lab]) -> None:
    """`up`, `run`, `down` do the steps and write the files that their dry runs list; `clean` removes .lab."""
    lab = fresh_lab(LAB_NODES="2")
    plan = planned(lab, "up")
    up = lab.call("up").expect(0)
    same_steps(plan, up.err)
    assert set(made(lab)) == written(plan)
    (compose,) = (text for text in texts(plan) if text.startswith("compose up"))
    reasons = next(line for line in plan if "compose up" in line)
    assert all(f"{node} missing" in reasons for node in lab.containers())
    assert compose.startswith("compose up worker-0, worker-1 ")
    assert sorted(lab.containers()) == ["launcher", "worker-0", "worker-1"]

    before, containers = made(lab), lab.identities()
    assert len(planned(lab, "up")) == 1
    lab.call("up").expect(0)
    assert (made(lab), lab.identities()) == (before, containers)

    plan = planned(lab, "run", "hello")
    result = lab.call("run", "hello", "--json").expect(0)
    same_steps(plan, result.err)
    run_id = result.json["run_id"]
    (dry_id,) = {re.search(r"to runs/([\w-]+)", text)[1] for text in texts(plan) if " to runs/" in text}  # type: ignore[index]
    new = {name.replace(run_id, dry_id) for name in set(made(lab)) - set(before)}
    outputs = f"runs/.outputs/{dry_id}/"
    assert f"{outputs}ranks/" in written(plan)
    assert any(re.fullmatch(rf"{outputs}work/ \(\d+ files? of project `hello`\)", path) for path in written(plan))
    # Paths written by ranks (logs, caches of compilers, work directories) and by nodes (samples).
    # The content of an image is listed once, at the first run.
    by_ranks = (f"runs/{dry_id}/ranks/", f"runs/{dry_id}/work/", f"runs/{dry_id}/samples/", ".lab/")
    written_here = {name for name in written(plan) if not name.startswith(outputs)}
    assert {name for name in new if not name.startswith(by_ranks)} == written_here
    assert {name: text for name, text in made(lab).items() if name in before} == before
    assert lab.identities() == containers
    recorded = (lab.path / "runs" / run_id / "plan.txt").read_text().splitlines()
    assert [line.replace(run_id, dry_id) for line in recorded] == plan

    plan = planned(lab, "down")
    names = ", ".join(("launcher", "worker-0", "worker-1"))
    assert texts(plan) == [f"remove {names}", f"remove network labctl-{lab.name}"]
    down = lab.call("down").expect(0)
    same_steps(plan, down.err)
    assert (lab.labelled(), before.keys() <= made(lab).keys()) == ([], True)

    clean = lab.call("clean").expect(0)
    assert carried_out(clean.err) == ["remove .lab"]
    assert not (lab.path / ".lab").exists()


def test_a_dry_run_of_a_run_on_a_lab_that_is_not_up_says_the_whole_of_it(fresh_lab: Callable[..., Lab]) -> None:
    """It lists the steps of `up` and of the run, and writes nothing."""
    lab = fresh_lab(LAB_NODES="2")
    plan = planned(lab, "run", "hello")
    assert [text.split()[0] for text in texts(plan)] == ["ask", "write", "in", "move", "write"]
    assert "rendered/nodes/worker-1/compose.yml" in plan[1]
    assert not (lab.path / ".lab").exists()


@pytest.mark.parametrize("command", [(), ("--dry-run",)])
def test_a_dry_run_refuses_what_the_command_refuses(lab: Lab, command: tuple[str, ...]) -> None:
    """A missing launcher or image gives exit code 3 and the same message with and without --dry-run."""
    answer = lab.call("run", "hello", "--launcher", "horovod", *command).expect(3)
    assert "launcher `horovodrun` not found in image" in answer.err
    answer = lab.call("up", "-s", "LAB_IMAGE=far.example/none:1", *command).expect(3)
    assert "image far.example/none:1 not found" in answer.err


def test_the_paths_of_a_plan_are_read_as_they_are_meant() -> None:
    """`written` reads paths from `write` steps only, and puts those of a run below it."""
    assert written(["#1 write a, b  [why]", "#2 write c, d/ to runs/x  [why]", "#3 reach w  [why]"]) == {
        *("a", "b", "runs/x/c", "runs/x/d/"),
    }
