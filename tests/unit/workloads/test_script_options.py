"""Options of scripts, read from their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.workloads import script_options

PLAIN = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nargs = parser.parse_args()\n"
HF = """\
from transformers import HfArgumentParser, TrainingArguments
parser = HfArgumentParser(TrainingArguments)
raise ValueError("use '--overwrite_output_dir'")
"""


def are_all_declared(folder: Path, **texts: str) -> bool:
    """Write these scripts; return True if all options of train.py are declared in what can be read."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return script_options.are_all_declared(folder, "train.py")


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "from argparse import ArgumentParser\nadd = ArgumentParser().add_argument\nadd('--lr')\n",
        f"def common(parser):\n    parser.add_argument('--seed')\n{PLAIN}common(parser)\n",
    ],
)
def test_a_parser_of_argparse_is_read_whole(tmp_path: Path, text: str) -> None:
    """Read scripts with argparse: True."""
    assert are_all_declared(tmp_path, train=text)


@pytest.mark.parametrize(
    "text",
    [
        HF,
        f"{PLAIN}{HF}",
        "print('--lr')",
        "import fire\nfire.Fire(main)\n",
        "from jsonargparse import ArgumentParser\nparser = ArgumentParser()\n",
        "import simple_parsing\nparser = simple_parsing.ArgumentParser()\n",
        PLAIN.replace("parse_args", "parse_known_args"),
        f"import deepspeed\n{PLAIN}parser = deepspeed.add_config_arguments(parser)\n",
        PLAIN.replace("ArgumentParser()", "ArgumentParser(parents=[common])"),
        "def broken(:\n",
    ],
)
def test_a_parser_to_which_others_add_is_not_read_whole(tmp_path: Path, text: str) -> None:
    """Read scripts with other or extended parsers: False."""
    assert not are_all_declared(tmp_path, train=text)


def test_the_modules_that_a_script_imports_from_its_folder_are_read_too(tmp_path: Path) -> None:
    """Read a script with modules of its folder: those that it imports decide."""
    assert are_all_declared(tmp_path, train="from arguments import parse\nparse()\n", arguments=PLAIN)
    assert not are_all_declared(tmp_path, arguments=f"import train\n{HF}")
    assert are_all_declared(tmp_path, train=PLAIN, other=HF), "a script that it does not import is another's"


def test_a_script_elsewhere_and_one_of_another_language_are_not_read(tmp_path: Path) -> None:
    """Read a shell script or one of another folder: False."""
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "start.sh").write_text("python train.py\n")
    assert not script_options.are_all_declared(tmp_path, "start.sh")
    assert not script_options.are_all_declared(tmp_path / "other", str(tmp_path / "train.py"))
