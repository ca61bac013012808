"""Mistakes that new users make, and labctl's answers: docs/dev/mistakes.md as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/dev/mistakes.md"
WORKLOAD = "description: my own\nlauncher: torchrun\nscript: train.py\ntimeout: 60s\n"


@dataclass(frozen=True)
class Mistake:
    """A mistake and labctl's answer, a row of docs/dev/mistakes.md; ``says`` and ``hint`` are parts of the output."""

    what: str
    typed: str
    """Command, after ``labctl``."""
    code: int
    says: str
    hint: str
    setting: str = ""
    """Line of .env."""
    files: dict[str, str] = field(default_factory=dict)
    """Files in the lab directory, by name."""

    @property
    def row(self) -> str:
        typed = ", ".join(f"`{line}`" for line in (self.setting, f"labctl {self.typed}") if line)
        return f"| {self.what} | {typed} | {self.code} | {self.says} | {self.hint} |"


TRAIN = {"train.py": "print(1)\n"}

TYPED = (
    Mistake("a command of Compose", "ps", 2, "no command `ps`", "labctl status"),
    Mistake(
        "options before the command", "-s LAB_NODES=3 up", 2, "`-s` is before the command", "labctl up -s LAB_NODES=3"
    ),
    Mistake("a number of nodes as an argument", "up 3", 2, "unexpected argument `3`", "labctl up -s LAB_NODES=3"),
    Mistake("a script for a workload", "run train.py", 2, "no workload `train.py`", "--script train.py", files=TRAIN),
    Mistake("a workload misspelt", "run helo", 2, "no workload `helo`", "the nearest is `hello`"),
    Mistake(
        "a script misspelt", "run --script tran.py", 2, "script not found", "did you mean `train.py`?", files=TRAIN
    ),
    Mistake(
        "arguments without `--`",
        "run --script train.py --lr 0.1",
        2,
        "no option `--lr`",
        "arguments of the script follow `--`",
        files=TRAIN,
    ),
    Mistake(
        "ranks as mpirun's option",
        "run --script train.py -n 4",
        2,
        "no option `-n`",
        "LAB_NODES and LAB_SLOTS",
        files=TRAIN,
    ),
    Mistake(
        "a launcher misspelt",
        "run --script train.py --launcher mpi",
        2,
        "unknown launcher `mpi`",
        "mpirun",
        files=TRAIN,
    ),
    Mistake(
        "a script that is not executable",
        "run --script job.sh",
        2,
        "neither Python nor executable",
        "chmod +x",
        files={"job.sh": "echo hi\n"},
    ),
    Mistake("a value without a key", "run hello --set =0.1", 2, "--set =0.1: no key", "--set KEY=VALUE"),
    Mistake("a time limit in words", "run hello --timeout soon", 2, "not a duration", "30s, 20m, 2h"),
    Mistake("a criterion of another form", "run hello --expect speed=>3", 2, "not an expectation", "throughput>=600"),
    Mistake("a key misspelt", "up", 2, "unknown key LAB_NODE", "did you mean LAB_NODES?", setting="LAB_NODE=2"),
    Mistake("a number in words", "up", 2, "must be a whole number from 1", "write digits", setting="LAB_NODES=two"),
    Mistake("blanks around `=`", "up", 2, "blanks before '='", "KEY=value", setting="LAB_NODES = 2"),
    Mistake(
        "a word for the accelerator",
        "up",
        2,
        "unknown accelerator 'gpu'",
        "did you mean nvidia?",
        setting="LAB_ACCELERATOR=gpu",
    ),
    Mistake("a name with a blank", "up", 2, "blanks in the bare value", "must be quoted", setting="LAB_NAME=My Lab"),
    Mistake("a size in words", "up", 2, "must be a size", "512m or 8g", setting="LAB_SHM_SIZE=lots"),
    Mistake("half a version", "up", 2, "is not a name with a version", "transformers<5", setting="LAB_PACKAGES=nltk=="),
    Mistake(
        "no file of requirements",
        "up",
        2,
        "r.txt: cannot be read: No such file",
        "name a file of requirements",
        setting="LAB_REQUIREMENTS=r.txt",
    ),
    Mistake("half a mount", "up", 2, "must be mounts", "/data/imagenet:/data:ro", setting="LAB_MOUNTS=/data"),
    Mistake(
        "a host for the file of hosts",
        "up",
        2,
        "node-1: cannot be read: No such file",
        "LAB_HOSTS names a file",
        setting="LAB_HOSTS=node-1",
    ),
    Mistake(
        "a key of workload.yml misspelt",
        "run mine",
        2,
        "unknown key `scrpt`",
        "did you mean `script`?",
        files={"workloads/mine/workload.yml": WORKLOAD.replace("\nscript", "\nscrpt"), "workloads/mine/train.py": ""},
    ),
    Mistake(
        "a launcher that there is not",
        "run mine",
        2,
        "unknown launcher `slurm`",
        "known: deepspeed",
        files={"workloads/mine/workload.yml": WORKLOAD.replace("torchrun", "slurm"), "workloads/mine/train.py": ""},
    ),
    Mistake(
        "a script that is not beside its workload.yml",
        "run mine",
        2,
        "script `train.py` is not in",
        "put it there",
        files={"workloads/mine/workload.yml": WORKLOAD},
    ),
    Mistake(
        "`DOCKER_HOST` of an engine that is not there", "up", 3, "Docker Engine does not answer", "unset DOCKER_HOST"
    ),
)
"""Mistakes reported before anything is started."""

STARTED = (
    Mistake(
        "a mount that is not there",
        "up -s LAB_MOUNTS=/nosuch:/data",
        3,
        "/nosuch, mounted at /data, not found",
        "mkdir -p",
    ),
    Mistake(
        "an image that is not here",
        "up -s LAB_IMAGE=pytorch/pytorch",
        3,
        "image pytorch/pytorch not found",
        "docker pull",
    ),
    Mistake("more nodes than are up", "run hello-mpi -s LAB_NODES=3", 3, "out of date", "labctl up -s LAB_NODES=3"),
    Mistake("a node that there is not", "shell worker9", 2, "has no node `worker9`", "worker-0, worker-1"),
    Mistake("a program that there is not", "exec -- nvidia-smi", 127, "command not found: `nvidia-smi`", "LAB_APT"),
    Mistake(
        "a workload of another image", "run mnist-horovod", 3, "needs image labctl/horovod", "labctl up --workload"
    ),
    Mistake("a model that is too large", "run opt-13b", 3, "does-not-fit", "--rehearse"),
    Mistake("a run that there is not", "show 17", 2, "no run `17`", "the latest"),
    Mistake(
        "a launcher of another image",
        "run --script train.py --launcher horovod",
        3,
        "`horovodrun` not found in image",
        "LAB_IMAGE=labctl/horovod",
        files=TRAIN,
    ),
    Mistake(
        "a package that is missing",
        "run --script lacks.py",
        4,
        "No module named 'nltk'",
        "LAB_PACKAGES",
        files={"lacks.py": "import nltk\n"},
    ),
    Mistake(
        "writing where everyone reads",
        "run --script writes.py",
        4,
        "Read-only file system",
        "the current directory",
        files={"writes.py": "open('/workspace/workloads/x', 'w')\n"},
    ),
    Mistake(
        "data that is not mounted",
        "run --script reads.py",
        4,
        "No such file or directory: '/datasets/train.txt'",
        "LAB_MOUNTS=/datasets:/datasets:ro",
        files={"reads.py": "open('/datasets/train.txt')\n"},
    ),
    Mistake(
        "CUDA without a GPU",
        "run --script gpu.py",
        4,
        "not compiled with CUDA",
        "labctl devices",
        files={"gpu.py": "import torch\ntorch.zeros(1).cuda()\n"},
    ),
    Mistake(
        "a model from a hub that is not reached",
        "run --script hub.py",
        4,
        "127.0.0.1 is not reached from worker-0 within 3 s",
        "labctl cache --model",
        setting="LAB_ENV_HF_ENDPOINT=http://127.0.0.1:9",
        files={"hub.py": 'from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained("gpt2")\n'},
    ),
    Mistake(
        "a question to the person",
        "run --script asks.py",
        4,
        "EOFError",
        "as an argument, after `--`",
        files={"asks.py": "input('continue? ')\n"},
    ),
    Mistake(
        "an argument that is missing",
        "run --script args.py",
        4,
        "the following arguments are required: --data",
        "to the script after `--`",
        files={
            "args.py": """\
from argparse import ArgumentParser
parser = ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""
        },
    ),
    Mistake(
        "a script that never ends",
        "run --script hangs.py --timeout 3s",
        124,
        "timed out after 3 s",
        "--timeout 2h",
        files={"hangs.py": "import time\ntime.sleep(1000)\n"},
    ),
)
"""Mistakes reported in a lab that is up."""


def table() -> str:
    """Render the Markdown table of docs/dev/mistakes.md."""
    head = "| What | Typed, or in `.env` | Exit code | labctl says | and |\n|" + " --- |" * 5 + "\n"
    return head + "".join(f"{mistake.row}\n" for mistake in (*TYPED, *STARTED))
