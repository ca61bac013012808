from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.builders import lab

from labctl.config import settings
from labctl.engines import agent
from labctl.errors import ConfigError
from labctl.model import Lab
from labctl.runs import follow, store


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    (tmp_path / ".env").write_text("HF_TOKEN=hf_canary\n")
    return lab(directory=tmp_path)


def logs(of: Lab, rank: int | None, *, live: bool = False) -> list[str]:
    cluster: Any = SimpleNamespace(settings=settings.load(of.directory, {}, {}), engine=None)
    lines: list[str] = []
    follow.logs(cluster, of, "r1", lines.append, follow=live, rank=rank)
    return lines


def wrote(of: Lab, name: str, text: str | bytes) -> None:
    path = of.directory / "runs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_run_that_has_ended_is_printed_from_its_record(of: Lab) -> None:
    wrote(of, "r1/result.json", "{}")
    wrote(of, "r1/output.log", b"one\n\nworker-1: two \xff\nno end")
    wrote(of, "r1/ranks/rank-1.log", "two\n")
    wrote(of, "r1/ranks/rank-10.log", "ten\n")
    assert logs(of, None) == ["one", "", "worker-1: two \ufffd", "no end"]
    assert logs(of, 1) == ["two"]
    assert logs(of, 10) == ["ten"]


def test_output_that_is_larger_than_any_other_record_is_printed(of: Lab) -> None:
    lines = (store.LARGEST_RECORD >> 20) + 1
    wrote(of, "r1/output.log", (b"x" * ((1 << 20) - 1) + b"\n") * lines)
    assert len(logs(of, None)) == lines


def test_a_rank_of_an_elastic_launcher_is_printed_from_every_node_that_it_was_on(of: Lab) -> None:
    wrote(of, "r1/ranks/rank-0@worker-0.log", "before\n")
    wrote(of, "r1/ranks/rank-0@worker-1.log", "after\n")
    assert logs(of, 0) == ["before", "after"]


def test_a_rank_of_a_run_that_is_under_way_is_printed_so_far_without_secrets(of: Lab) -> None:
    wrote(of, ".outputs/r1/ranks/rank-0.log", "token hf_canary\n")
    assert logs(of, 0) == ["token [REDACTED]"]


def test_a_rank_without_a_log_is_an_error_that_says_where_its_lines_are(of: Lab) -> None:
    wrote(of, "r1/ranks/rank-0.log", "hello\n")
    with pytest.raises(ConfigError, match="run r1 has no log of rank 1 here") as caught:
        logs(of, 1)
    assert "-f follows" in caught.value.hint


def test_of_one_rank_only_what_it_says_is_followed(of: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def follow_all(*arguments: Any) -> None:
        for place, text in enumerate(("launcher", "worker-0: \x010\x02zero", "worker-1: \x011\x02one hf_canary")):
            arguments[3].read(f"{place + 1} 1000.5 {text}")

    monkeypatch.setattr(agent, "follow", follow_all)
    assert logs(of, 1, live=True) == ["one [REDACTED]"]
    assert logs(of, None, live=True) == ["launcher", "worker-0: zero", "worker-1: one [REDACTED]"]
