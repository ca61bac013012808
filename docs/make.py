"""Run the commands in the pages' ```console blocks, write what they print into the pages, and draw the pictures.

    PATH=$PWD/.venv/bin:$PATH python docs/make.py                 all pages and pictures
    PATH=$PWD/.venv/bin:$PATH python docs/make.py docs/tour.md    one page
    PATH=$PWD/.venv/bin:$PATH python docs/make.py pictures        the pictures alone, which need chromium and '.[page]'

Each page starts in an empty directory, and its lab is removed at its end. A command whose line ends in `# exit N` is
expected to end so, any other with 0.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
PAGES = ("README.md", "docs/tour.md")
WIDTH = 100
LONGEST, HEAD, TAIL = 30, 5, 12
"""Lines of an output that is shown whole, and those of a longer one that are shown."""
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"  +# exit (\d+)$")
SHORTEN = """home => document.querySelectorAll("td a").forEach(
  each => { each.textContent = each.textContent.replace(home, "~"); })"""
"""Script that writes the session's directory on a page as the home."""
ENVIRONMENT = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "30", "TERM": "xterm-256color"}


def main() -> None:
    """Make the pages that are named, or all, and the pictures."""
    for target in sys.argv[1:] or [*PAGES, "pictures"]:
        with Session() as session:
            if target == "pictures":
                draw_pictures(session)
            else:
                fill(ROOT / target, session)


def fill(page: Path, session: Session) -> None:
    """Run the commands of a page and write their output into it."""
    text = BLOCK.sub(lambda block: session.transcript(block[0]), page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")


class Session:
    """A shell of its own in an empty directory; the labs made in it are removed at the end."""

    def __enter__(self) -> Session:
        self.home = Path(tempfile.mkdtemp())
        self.directory = self.home
        return self

    def __exit__(self, *_: object) -> None:
        for env in self.home.glob("*/.env"):
            subprocess.run(["labctl", "clean"], cwd=env.parent, check=False, stdin=subprocess.DEVNULL)
        shutil.rmtree(self.home)

    def transcript(self, block: str) -> str:
        """Run the commands of a block in turn; return the block with what they printed."""
        commands = re.findall(r"^\$ (.*(?:\\\n.*)*)$", block, re.MULTILINE)
        return "".join(f"$ {command}\n{shortened(self.run(command))}" for command in commands)

    def run(self, command: str) -> str:
        """Run a command line; return its output with the session's directory as the home."""
        print(f"$ {command}", file=sys.stderr)
        expected = EXPECTED.search(command)
        script = f"{EXPECTED.sub('', command)}\ncode=$?; pwd >{self.home}/.directory; exit $code"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.directory, env=ENVIRONMENT, check=False, text=True, encoding="utf-8",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != int(expected[1] if expected else 0):
            raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}")
        self.directory = Path((self.home / ".directory").read_text(encoding="utf-8").strip())
        return done.stdout.replace(str(self.home), "~")


def shortened(output: str) -> str:
    """Return an output without what no reader needs: long lines cut, and the middle of many lines left out."""
    lines = [line.rstrip() for line in output.expandtabs().splitlines()]
    cut = [line if len(line) <= WIDTH + 20 else f"{line[: WIDTH + 17]}..." for line in lines]
    if len(cut) > LONGEST:
        cut = [*cut[:HEAD], "...", *cut[-TAIL:]]
    return "".join(f"{line}\n" for line in cut)


# --- pictures ------------------------------------------------------------------------------------------------


def draw_pictures(session: Session) -> None:
    """Draw a run half way, as `labctl top` and its page show it."""
    PICTURES.mkdir(exist_ok=True)
    session.run("labctl init mylab && cd mylab && labctl up && labctl run opt-tiny --detach")
    frame = watched(["labctl", "top"], session.directory, until=r"\b6\d/120")
    (PICTURES / "top.svg").write_text(svg(["$ labctl top", *frame]), encoding="utf-8")
    photograph("run/latest", session, PICTURES / "ui.png")


def photograph(path: str, session: Session, picture: Path) -> None:
    """Photograph the beginning of a page of `labctl ui` in 64 colors, once the run on it is past its middle."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    served = subprocess.Popen(
        ["labctl", "ui"], cwd=session.directory, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert served.stdout
    address = served.stdout.readline().strip()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1150})
        page.goto(address + path)
        page.get_by_text(re.compile(r"step [789]\d of 120")).wait_for(timeout=120_000)
        page.evaluate(SHORTEN, str(session.home))
        page.screenshot(path=picture)
        browser.close()
    served.send_signal(signal.SIGINT)
    served.wait()
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(picture, optimize=True)


def watched(command: list[str], directory: Path, until: str) -> list[str]:
    """Run a program with a screen in a terminal; return the first screen that matches, and type `q`."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(directory)
        os.execvpe(command[0], command, ENVIRONMENT)
    found = ""
    for screen in screens(terminal):
        if not found and re.search(until, screen):
            found = screen
            os.write(terminal, b"q")
    os.waitpid(child, 0)
    if not found:
        raise SystemExit(f"{command}: no screen with {until}")
    return "\n".join(line.rstrip() for line in plain(found.splitlines())).rstrip().splitlines()


def screens(terminal: int) -> Iterator[str]:
    """Yield each screen that a program draws from the upper left corner."""
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 65536)
        except OSError:
            return
        *whole, drawn = drawn.split(b"\033[H")
        yield from (screen.decode(errors="replace") for screen in whole)


def plain(lines: list[str]) -> list[str]:
    """Return lines without the codes of a terminal."""
    return [re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", line) for line in lines]


def svg(lines: list[str]) -> str:
    """Draw lines as a terminal of WIDTH columns."""
    across, down = 8.4, 20
    rows = [
        f'<text x="16" y="{34 + down * number}" textLength="{across * len(line):.1f}">{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
    size = f'width="{round(32 + across * WIDTH)}" height="{32 + down * len(lines)}"'
    font = "14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>text{{font:{font};fill:#d8dee9;white-space:pre}}</style>",
        f'<rect {size} rx="8" fill="#1c2128"/>',
    )
    return "\n".join((*head, *rows, "</svg>\n"))


if __name__ == "__main__":
    main()
