from __future__ import annotations

import os
from pathlib import Path

import pytest

from labctl.errors import ConfigError
from labctl.model import Criterion, Memory, Metric, Relative, Resume, Workload
from labctl.workloads.loader import list_all, load
from labctl.workloads.schema import parse_duration, parse_expectation, parse_metric

LAUNCHERS = ("deepspeed", "mpirun", "script")

MINIMAL = """\
description: prints a line
launcher: deepspeed
script: train.py
timeout: 30s
"""

FAMILY = r"""description: OPT
launcher: deepspeed
script: train.py
arguments: [--seed, 7, --lr, 1e-4, --ratio, 0.50]
environment: {OMP_NUM_THREADS: 2, MODE: common}
timeout: 2h
metrics:
  loss: {pattern: 'loss (\S+)', reduce: first-last}
  throughput: {pattern: 'Throughput: (\S+)', unit: samples/s, skip: 2, reduce: mean}
criteria:
  - {metric: loss, decrease: 0.2}
rehearse: {arguments: [--rehearse], timeout: 10m, criteria: [{metric: throughput, min: 0}]}
memory: {model: 'configs/{model}.json', sequence_length: 64, lora_modules: [fc1, fc2]}
variants:
  opt-tiny:
    description: minutes
    arguments: [--model, tiny]
    environment: {MODE: tiny}
    timeout: 90
    metrics:
      throughput: {pattern: 'Samples/s: (\S+)'}
      tokens: {pattern: 'tokens (\S+)'}
    criteria:
      - metric: tokens
        min: 1
        max: 1e3
  opt-13b: {}
"""


def test_a_file_without_variants_is_one_workload_named_as_its_folder(tmp_path: Path) -> None:
    """List a folder with a plain workload.yml: one workload with its fields and defaults."""
    directory = _write(tmp_path, hello=MINIMAL)
    workloads, errors = list_all(directory, LAUNCHERS)
    assert errors == ()
    assert workloads == (
        Workload(
            name="hello",
            description="prints a line",
            declared="workloads/hello/workload.yml:1",
            directory=directory / "hello",
            launcher="deepspeed",
            script="train.py",
            arguments=(),
            environment=(),
            timeout=30,
            metrics=(),
            criteria=(),
        ),
    )


def test_a_variant_adds_arguments_merges_environment_and_metrics_and_replaces_the_rest(tmp_path: Path) -> None:
    """Load a variant: arguments appended, environment and metrics merged, the rest replaced."""
    tiny = load(_write(tmp_path, opt=FAMILY), "opt-tiny", LAUNCHERS)
    assert tiny.description == "minutes"
    assert tiny.declared == "workloads/opt/workload.yml:15"
    assert tiny.arguments == ("--seed", "7", "--lr", "1e-4", "--ratio", "0.50", "--model", "tiny")
    assert tiny.environment == (("OMP_NUM_THREADS", "2"), ("MODE", "tiny"))
    assert tiny.timeout == 90
    assert tiny.metrics == (
        Metric(name="loss", pattern=r"loss (\S+)", reduce="first-last"),
        Metric(name="throughput", pattern=r"Samples/s: (\S+)"),
        Metric(name="tokens", pattern=r"tokens (\S+)"),
    )
    assert tiny.criteria == (Criterion(metric="tokens", min=1, max=1000),)


def test_an_empty_variant_has_the_common_fields(tmp_path: Path) -> None:
    """Load an empty variant: the common fields."""
    large = load(_write(tmp_path, opt=FAMILY), "opt-13b", LAUNCHERS)
    assert (large.description, large.timeout, large.criteria) == (
        "OPT",
        7200,
        (Criterion(metric="loss", decrease=0.2),),
    )
    defaults = (("sequence_length", ("64",)), ("lora_modules", ("fc1", "fc2")))
    assert large.memory == Memory(model="configs/{model}.json", defaults=defaults)


def test_a_rehearsal_adds_arguments_replaces_timeout_and_criteria_and_drops_memory(tmp_path: Path) -> None:
    """Load with rehearse: arguments appended, timeout and criteria replaced, memory None."""
    rehearsal = load(_write(tmp_path, opt=FAMILY), "opt-13b", LAUNCHERS, rehearse=True)
    assert rehearsal.arguments[-2:] == ("0.50", "--rehearse")
    assert (rehearsal.timeout, rehearsal.memory) == (600, None)
    assert rehearsal.criteria == (Criterion(metric="throughput", min=0),)


def test_what_a_rehearsal_does_not_name_stays(tmp_path: Path) -> None:
    """Load with an empty rehearse section: the same workload."""
    directory = _write(tmp_path, hello=MINIMAL + "rehearse: {}\n")
    assert load(directory, "hello", LAUNCHERS, rehearse=True) == load(directory, "hello", LAUNCHERS)


def test_without_a_rehearse_section_there_is_no_rehearsal(tmp_path: Path) -> None:
    """Load with rehearse but without the section: ConfigError."""
    with pytest.raises(ConfigError, match=r"^workloads/hello/workload\.yml:1: .*no `rehearse` section"):
        load(_write(tmp_path, hello=MINIMAL), "hello", LAUNCHERS, rehearse=True)


def test_workloads_come_by_folder_then_in_the_order_of_the_file(tmp_path: Path) -> None:
    """List workloads: by folder, then in the order of the file; other folders are skipped."""
    directory = _write(tmp_path, zeta=MINIMAL, opt=FAMILY, alpha=MINIMAL)
    (directory / "data").mkdir()
    assert [workload.name for workload in list_all(directory, LAUNCHERS)[0]] == ["alpha", "opt-tiny", "opt-13b", "zeta"]


@pytest.mark.parametrize(
    ("line", "replacement", "number", "reason", "hint"),
    [
        ("timeout: 30s", "timeout: 30s\nargments: [a]", 5, "unknown key `argments`", "did you mean `arguments`?"),
        ("timeout: 30s", "timeout: 30s\ntimeout: 40s", 5, "duplicate key `timeout`, first on line 4", ""),
        ("timeout: 30s", "timeout: 30s\n<<: {a: b}", 5, "unknown key `<<`", "known: "),
        ("timeout: 30s", "timeout: 30s\n? [a]\n: b", 5, "a key of `workload.yml` must be text", ""),
        ("timeout: 30s", "timeout: soon", 4, "`soon` is not a duration", "30s, 20m, 2h"),
        ("timeout: 30s", "timeout: 0", 4, "`0` is not a duration", ""),
        ("timeout: 30s", "timeout: [30s]", 4, "`timeout` must be text, not a list", ""),
        ("timeout: 30s", "", 1, "workload `broken` has no `timeout`", ""),
        ("description: prints a line", "", 2, "workload `broken` has no `description`", ""),
        ("description: prints a line", "description:", 1, "`description` is empty, which YAML reads as null", ""),
        ("launcher: deepspeed", "", 1, "workload `broken` has no `launcher`", ""),
        ("launcher: deepspeed", "launcher: deepsped", 2, "unknown launcher `deepsped`", "did you mean `deepspeed`?"),
        ("launcher: deepspeed", "launcher: qqq", 2, "unknown launcher `qqq`", "known: deepspeed, mpirun, script"),
        ("script: train.py", "script: missing.py", 3, "script `missing.py` is not in", ""),
        ("script: train.py", "script: .", 3, "script `.` is not in", ""),
        ("script: train.py", "script: ../../secret.py", 3, "is outside the folder of its workload", ""),
        (
            "script: train.py",
            "script: train.py\nprepare: /etc/passwd",
            4,
            "script `/etc/passwd` is outside the folder of its workload",
            "",
        ),
        ("script: train.py", "script: link.py", 3, "is outside the folder of its workload", ""),
        ("script: train.py", "script: train.py: x", 3, "not YAML: mapping values are not allowed here", ""),
        ("script: train.py", "script: 'train.py", 5, "not YAML", ""),
        ("script: train.py", "\tscript: train.py", 3, "not YAML: found character '\\t' that", "not with tabs"),
        ("script: train.py", "script: *nowhere", 3, "not YAML: found undefined alias", ""),
        ("script: train.py", "script: a\x07b", 3, "contains a control character", ""),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, *, line: str, replacement: str, number: int, reason: str, hint: str
) -> None:
    """Load a faulty file: one error with line, reason and hint."""
    _refused(tmp_path, MINIMAL.replace(line, replacement), number, reason, hint)


@pytest.mark.parametrize(
    ("block", "number", "reason"),
    [
        ("arguments: --seed 7", 5, "`arguments` must be a list, not text"),
        ("arguments:\n  - --seed\n  - true", 7, "`arguments` is true, which YAML reads as bool; quote it"),
        ("arguments: [2024-01-01]", 5, "which YAML reads as timestamp; quote it"),
        ("arguments: [[a]]", 5, "`arguments` must be text, not a list"),
        ('arguments: ["a\\0b"]', 5, "contains a NUL byte"),
        ("environment: [A=1]", 5, "`environment` must be a mapping, not a list"),
        ("environment:\n  1A: x", 6, "bad environment name `1A`"),
        ("environment: {A: yes}", 5, "`A` is yes, which YAML reads as bool"),
        ("metrics: {loss: {unit: s}}", 5, "`loss` has no `pattern`"),
        ("metrics: {'a b': {pattern: (x)}}", 5, "bad metric name `a b`"),
        ("metrics:\n  loss:\n    pattern: 'loss (['", 7, "is not a regular expression"),
        ("metrics: {loss: {pattern: loss}}", 5, "exactly one group, the number; it has 0"),
        ("metrics: {loss: {pattern: '(a)(b)'}}", 5, "exactly one group, the number; it has 2"),
        ("metrics: {loss: {pattern: (x), reduce: avg}}", 5, "unknown reduce `avg`"),
        ("metrics: {loss: {pattern: (x), skip: -1}}", 5, "`skip` must be a whole number, not `-1`"),
        ("metrics: {loss: {pattern: (x), skip: '1'}}", 5, "`skip` must be a whole number"),
        ("metrics: {loss: {pattern: (x)}}\ncriteria:\n  - {metric: los, min: 1}", 7, "no metric `los`"),
        ("metrics: {loss: {pattern: (x)}}\ncriteria: [{metric: loss, decrease: 0.2}]", 6, "`reduce: first-last`"),
        ("criteria: [{metric: loss}]", 5, "a criterion needs `min`, `max` or `decrease`"),
        ("criteria: [{min: 1}]", 5, "`criteria` has no `metric`"),
        ("criteria: [{metric: loss, min: 2, max: 1}]", 5, "`min` is above `max`"),
        ("criteria: [{metric: loss, decrease: 20}]", 5, "`decrease` is a share"),
        ("criteria: [{metric: loss, min: fast}]", 5, "`min` must be a number, not `fast`"),
        ("criteria: [{metric: loss, min: nan}]", 5, "`min` must be a number, not `nan`"),
        ("criteria: [{metric: loss, min: '1'}]", 5, "`min` must be a number"),
        ("rehearse: {memory: {}}", 5, "unknown key `memory`"),
        ("metrics: {m: {pattern: (x)}}\nrehearse: {criteria: [{metric: loss, min: 1}]}", 6, "no metric `loss`"),
        ("resume: {argument: --resume}", 5, "`resume` has no `checkpoint`"),
        ("resume: {argument: resume, checkpoint: a}", 5, "`resume` is not a valid script option"),
        ("resume: {argument: --a b, checkpoint: a}", 5, "`--a b` is not a valid script option"),
        ("resume: {argument: --resume, checkpoint: ../a}", 5, "`../a` is not a path in the run's directory"),
        ("resume: {argument: --resume, checkpoint: .}", 5, "`.` is not a path in the run's directory"),
        ("resume: {argument: --resume, checkpoint: /a}", 5, "`/a` is not a path in the run's directory"),
        ("resume: {argument: --resume, checkpoint: '**/a'}", 5, "`**/a` is not a path in the run's directory"),
        ("resume: {argument: --resume, checkpoint: a, marker: ../b}", 5, "`../b` is not a path"),
        ("elastic: 1", 5, "`elastic` must be true or false"),
        ("memory: {task: sft}", 5, "`model`, a config.json, or `parameters`, their number"),
        ("memory: {model: a.json, task: dpo}", 5, "unknown task `dpo`"),
        ("memory: {model: a.json, lora_dim: 1.5}", 5, "whole number"),
        ("variants: {}", 1, "`variants` declares no workload"),
        ("variants: [a]", 5, "`variants` must be a mapping, not a list"),
        ("variants:\n  a b: {}", 6, "bad workload name `a b`"),
        ("variants:\n  a:", 6, "`a` must be a mapping, not text"),
        ("variants:\n  a:\n    scrip: x", 7, "unknown key `scrip`"),
        ("variants:\n  a:\n    script: x", 7, "script `x` is not in"),
        ("launcher_arguments: --mca", 5, "`launcher_arguments` must be a list, not text"),
        ("image: Horovod", 5, "bad image `Horovod`"),
        ("prepare: ../prepare.sh", 5, "is outside the folder of its workload"),
        ("variants:\n  a: {launcher: script, prepare: train.py}", 6, "nothing runs its `prepare`"),
        ("inputs: {data-path: folder}", 5, "unknown data-path `folder`"),
        ("inputs: {--data-path: directory}", 5, "bad argument name `--data-path`"),
        ("deepspeed: {bf16: true}", 5, "`bf16` must be an object"),
        ("deepspeed: {zero_optimization: {stage: 4}}", 5, "`zero_optimization.stage` must be 0, 1, 2 or 3"),
        ("cache: {models: [a b]}", 5, "bad name on the hub `a b`"),
        ("cache: {weights: [a]}", 5, "unknown key `weights`"),
        ("notes: {weights: weights}", 5, "exactly one group, the text; it has 0"),
        ("--- \nmore", 5, "not YAML: but found another document"),
    ],
)
def test_a_field_of_the_wrong_kind_is_told_with_its_line(tmp_path: Path, block: str, number: int, reason: str) -> None:
    """Load a field of the wrong kind: one error with line and reason."""
    _refused(tmp_path, f"{MINIMAL}{block}\n", number, reason)


def test_what_the_record_is_to_quote_is_declared_by_name(tmp_path: Path) -> None:
    """Load notes of family and variant: both patterns."""
    text = f"{MINIMAL}notes: {{weights: 'weights: (.*)'}}\nvariants: {{a: {{notes: {{data: 'data: (.*)'}}}}}}\n"
    directory = _write(tmp_path, family=text)
    assert load(directory, "a", LAUNCHERS).notes == (("weights", "weights: (.*)"), ("data", "data: (.*)"))


@pytest.mark.parametrize(
    ("content", "number", "reason"),
    [
        (b"", 1, "is empty"),
        (b"# only a comment\n", 1, "is empty"),
        (b"- a\n", 1, "`workload.yml` must be a mapping, not a list"),
        (b"description: a\nscript: \xff\n", 2, "is not UTF-8"),
        pytest.param(b"[" * 5000, 1, "is nested too deeply", id="deep"),
        (MINIMAL.encode() + b"arguments: &a [*a]\n", 5, "an alias contains itself"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(tmp_path: Path, content: bytes, number: int, reason: str) -> None:
    """Load a file that is no mapping in UTF-8: one error with line and reason."""
    _refused(tmp_path, content, number, reason)


BOMB = "".join(f"  a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 10))
# Each line is not deep, but holds the one before it.
LADDER = "".join(f"  a{number}: &a{number} {'[' * 50}*a{number - 1}{']' * 50}\n" for number in range(1, 100))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("deepspeed: &a {b: *a}\n", "an alias contains itself"),
        ("deepspeed: &a\n  b: [*a, *a]\n", "an alias contains itself"),
        (f"deepspeed:\n  a0: &a0 [{'x, ' * 10}]\n{BOMB}", "values with its aliases"),
        (f"deepspeed:\n  a0: &a0 [x]\n{LADDER}", "is nested too deeply"),
        pytest.param("#" * (2 << 20), "is larger than 1 MiB", id="large"),
    ],
)
def test_a_file_that_would_take_all_time_and_memory_is_named_and_the_others_are_read(
    tmp_path: Path, content: str, reason: str
) -> None:
    """List a file with recursive or exploding aliases: its error, and the other workload."""
    directory = _write(tmp_path, bomb=MINIMAL + content, hello=MINIMAL)
    workloads, errors = list_all(directory, LAUNCHERS)
    assert [workload.name for workload in workloads] == ["hello"]
    assert [error.message.partition(":")[0] for error in errors] == ["workloads/bomb/workload.yml"]
    assert reason in errors[0].message
    assert load(directory, "hello", LAUNCHERS).name == "hello"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """List folders with a FIFO or a link to /dev/zero: errors without blocking, and the other workload."""
    directory = _write(tmp_path, hello=MINIMAL)
    for name in ("pipe", "zero"):
        (directory / name).mkdir()
    os.mkfifo(directory / "pipe/workload.yml")
    (directory / "zero/workload.yml").symlink_to("/dev/zero")
    workloads, errors = list_all(directory, LAUNCHERS)
    assert [workload.name for workload in workloads] == ["hello"]
    assert [error.message for error in errors] == [
        f"workloads/{name}/workload.yml:1: is not a regular file" for name in ("pipe", "zero")
    ]
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(directory, "pipe", LAUNCHERS)


def test_an_alias_is_what_it_stands_for(tmp_path: Path) -> None:
    """Load an alias: its value."""
    directory = _write(tmp_path, hello=f"{MINIMAL}arguments: &a [x]\nlauncher_arguments: *a\n")
    assert load(directory, "hello", LAUNCHERS).launcher_arguments == ("x",)


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    """Load a file with CRLF and a byte order mark: accepted."""
    directory = _write(tmp_path, hello=b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load(directory, "hello", LAUNCHERS).script == "train.py"


def test_one_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    """List with a broken file: its error, and the other workload; loading it is ConfigError."""
    directory = _write(tmp_path, broken="a: 1\n", hello=MINIMAL)
    workloads, errors = list_all(directory, LAUNCHERS)
    assert [workload.name for workload in workloads] == ["hello"]
    assert [error.message for error in errors] == ["workloads/broken/workload.yml:1: unknown key `a`"]
    assert load(directory, "hello", LAUNCHERS).name == "hello"
    with pytest.raises(ConfigError, match=r"^workloads/broken/workload\.yml:1: unknown key `a`"):
        load(directory, "broken", LAUNCHERS)


def test_an_unknown_workload_is_not_blamed_on_the_broken_file_of_another(tmp_path: Path) -> None:
    """Load an unknown name beside a broken file: it is unknown; the file's error only if it has the name as a key."""
    directory = _write(tmp_path, broken="a: gone\nvariants: {here: {}}\n", hello=MINIMAL)
    with pytest.raises(ConfigError, match=r"^no workload `gone`"):
        load(directory, "gone", LAUNCHERS)
    with pytest.raises(ConfigError, match=r"^workloads/broken/workload\.yml:1: unknown key `a`"):
        load(directory, "here", LAUNCHERS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("opt-tny", "the nearest is `opt-tiny` (workloads/opt/workload.yml:15); "),
        ("OPT-13B", "the nearest is `opt-13b` (workloads/opt/workload.yml:27); "),
        ("zzz", ""),
    ],
)
def test_an_unknown_name_is_told_the_nearest_and_where_it_is(tmp_path: Path, name: str, nearest: str) -> None:
    """Load an unknown name: ConfigError with the nearest and its line."""
    with pytest.raises(ConfigError) as caught:
        load(_write(tmp_path, opt=FAMILY), name, LAUNCHERS)
    assert caught.value.message == f"no workload `{name}`"
    assert caught.value.hint == f"{nearest}`labctl workloads` lists them"


def test_a_variant_may_resume_in_a_way_of_its_own(tmp_path: Path) -> None:
    """Load a variant with its own resume section: it replaces the common one."""
    more = "resume: {argument: --resume, checkpoint: 'ckpt/*.pt'}\nvariants: {hello: {}, hello-hf: {elastic: true, "
    more += "resume: {argument: --resume_from, checkpoint: out/checkpoint-*, marker: trainer_state.json}}}\n"
    directory = _write(tmp_path, hello=MINIMAL + more)
    common, second = (load(directory, name, LAUNCHERS) for name in ("hello", "hello-hf"))
    assert (common.resume, common.elastic) == (Resume("--resume", "ckpt/*.pt"), False)
    assert (second.resume, second.elastic) == (Resume("--resume_from", "out/checkpoint-*", "trainer_state.json"), True)


def test_a_name_declared_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    """Declare a name twice: ConfigError names both lines, other variants load."""
    directory = _write(tmp_path, **{"opt": FAMILY, "opt-tiny": MINIMAL})
    message = (
        "workloads/opt-tiny/workload.yml:1: workload `opt-tiny` is already declared at workloads/opt/workload.yml:15"
    )
    with pytest.raises(ConfigError) as caught:
        load(directory, "opt-tiny", LAUNCHERS)
    assert caught.value.message == message
    assert [error.message for error in list_all(directory, LAUNCHERS)[1]] == [message]
    assert load(directory, "opt-13b", LAUNCHERS).name == "opt-13b"


def test_a_missing_or_empty_folder_of_workloads_is_an_error(tmp_path: Path) -> None:
    """List a missing folder or load from an empty one: ConfigError."""
    with pytest.raises(ConfigError, match=r"is not a lab directory \(no absent/\)"):
        list_all(tmp_path / "absent", LAUNCHERS)
    with pytest.raises(ConfigError, match="no workload is declared here"):
        load(tmp_path, "opt", LAUNCHERS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("20m", 1200), ("2h", 7200), ("90", 90), ("0.5", 0.5), ("1.5h", 5400), (" 5 ", 5)],
)
def test_durations(text: str, seconds: float) -> None:
    """Parse durations: seconds."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-1", "2d", "1h30m", "1e3", "inf", "nan", "s", "1:30", "9" * 400, "9000h"]
)
def test_what_is_no_duration(text: str) -> None:
    """Parse invalid durations: ConfigError."""
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "criterion"),
    [
        ("throughput>=600", Criterion(metric="throughput", min=600)),
        (" loss <= 2.5 ", Criterion(metric="loss", max=2.5)),
        ("tokens_per-s>=1e3", Criterion(metric="tokens_per-s", min=1000)),
        ("loss<=-1", Criterion(metric="loss", max=-1)),
        ("throughput>0", Criterion(metric="throughput", above=0)),
        ("loss < 2.5", Criterion(metric="loss", below=2.5)),
        ("throughput=600..700", Criterion(metric="throughput", min=600, max=700)),
        ("reward = -1.5..-.5", Criterion(metric="reward", min=-1.5, max=-0.5)),
        ("m>=-5% of r1", Criterion(metric="m", relative=Relative(">=", -0.05, "r1"))),
        ("m < +2.5 % of latest", Criterion(metric="m", relative=Relative("<", 0.025, "latest"))),
    ],
)
def test_expectations(text: str, criterion: Criterion) -> None:
    """Parse expectations: a Criterion with bounds, or relative to a run."""
    assert parse_expectation(text) == criterion


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "x=1", "x==1", "x=>1", "x>=", ">=1", "x>=fast", "x>=nan", "x>=inf", "x>=1 s", "x=2..1", "x=1.."),
        *("x>=1..2", "x=-5% of r", "x>=-5%", "x>=5 of r", "x>=-5% of", "x>=-5% of two runs", "x>=nan% of r"),
    ],
)
def test_what_is_no_expectation(text: str) -> None:
    """Parse invalid expectations: ConfigError."""
    with pytest.raises(ConfigError, match="is not an expectation"):
        parse_expectation(text)


def test_a_metric_is_written_as_a_name_and_a_pattern() -> None:
    """Parse NAME=PATTERN: a Metric."""
    assert parse_metric(r"bleu=BLEU = (\S+)") == Metric(name="bleu", pattern=r"BLEU = (\S+)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bleu", "no name and pattern"),
        ("bleu=", "no name and pattern"),
        ("=(x)", "no name and pattern"),
        ("a b=(x)", "no name and pattern"),
        ("bleu=x", "must have exactly one group, the number; it has 0"),
        ("bleu=(x)(y)", "it has 2"),
        ("bleu=(x", "is not a regular expression"),
    ],
)
def test_what_is_no_metric(text: str, reason: str) -> None:
    """Parse an invalid metric: ConfigError with the reason."""
    with pytest.raises(ConfigError, match=reason):
        parse_metric(text)


def test_a_criterion_may_be_written_as_for_expect(tmp_path: Path) -> None:
    """Load criteria as text and mappings: the same Criteria."""
    text = MINIMAL + "metrics: {m: {pattern: (x)}}\ncriteria: [m > 0, m=1..2, {metric: m, min: 3}]\n"
    assert load(_write(tmp_path, own=text), "own", LAUNCHERS).criteria == (
        Criterion(metric="m", above=0),
        Criterion(metric="m", min=1, max=2),
        Criterion(metric="m", min=3),
    )


@pytest.mark.parametrize(("word", "reason"), [("m => 0", "is not an expectation"), ("speed > 0", "no metric `speed`")])
def test_a_criterion_that_is_wrong_in_words_has_its_line(word: str, reason: str, tmp_path: Path) -> None:
    """Load an invalid criterion as text: one error with its line."""
    text = f"metrics: {{m: {{pattern: (x)}}}}\ncriteria:\n  - {word}\n"
    _refused(tmp_path, MINIMAL + text, MINIMAL.count("\n") + 3, reason)


def _write(root: Path, **files: str | bytes) -> Path:
    """Write a ``workloads`` folder with a workload per file: workload.yml, a script and a link; return the folder."""
    directory = root / "workloads"
    for name, content in files.items():
        folder = directory / name
        folder.mkdir(parents=True)
        (folder / "train.py").touch()
        (folder / "link.py").symlink_to("/etc/passwd")
        (folder / "workload.yml").write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def _refused(root: Path, content: str | bytes, number: int, reason: str, hint: str = "") -> None:
    """List a workload with this content: one error with line, reason and hint, exit code 2."""
    _, errors = list_all(_write(root, broken=content), LAUNCHERS)
    (error,) = errors
    assert error.message.startswith(f"workloads/broken/workload.yml:{number}: ")
    assert reason in error.message
    assert hint in error.hint
    assert error.exit_code == 2


def test_a_rehearsal_requires_no_inputs(tmp_path: Path) -> None:
    """Load with required inputs: none are required in a rehearsal."""
    text = MINIMAL + "inputs: {model: model}\nrequired_inputs: [model]\nrehearse: {arguments: [--rehearse]}\n"
    directory = _write(tmp_path, tune=text)
    assert load(directory, "tune", LAUNCHERS).required_inputs == ("model",)
    assert load(directory, "tune", LAUNCHERS, rehearse=True).required_inputs == ()


def test_keys_and_the_launcher_are_taken_by_their_names_of_before(tmp_path: Path) -> None:
    """Load a file with deprecated keys and launcher: accepted as the present ones."""
    text = (
        "describe: of before\nlauncher: own\nscript: train.py\ntimeout: 1m\ninputs: {model: model}\nrequires: [model]\n"
        "metrics: {loss: {pattern: (x), reduce: first-last}}\ncriteria: [{metric: loss, drop: 0.2}]\n"
    )
    old = load(_write(tmp_path, old=text), "old", LAUNCHERS)
    assert (old.description, old.launcher, old.required_inputs) == ("of before", "script", ("model",))
    assert old.criteria == (Criterion(metric="loss", decrease=0.2),)


def test_a_key_by_both_of_its_names_is_a_duplicate(tmp_path: Path) -> None:
    """Give a key and its deprecated name: ConfigError."""
    with pytest.raises(ConfigError, match="duplicate key `description`, first on line 1"):
        load(_write(tmp_path, broken=f"describe: x\n{MINIMAL}"), "broken", LAUNCHERS)


# --- packages ------------------------------------------------------------------------------------------------


def declare(directory: Path, text: str) -> Workload:
    """Write workload `mine` with this text added; return it as loaded."""
    folder = directory / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").touch()
    (folder / "workload.yml").write_text(MINIMAL + text)
    return load(directory, "mine", LAUNCHERS)


def test_packages_are_those_that_are_listed_and_those_of_the_file(tmp_path: Path) -> None:
    """Load packages and requirements: both lists, blanks removed, and apt."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/requirements.txt").write_text("nltk==3.9\n")
    text = "packages: ['transformers >= 4, < 5']\nrequirements: requirements.txt\napt: [git]\n"
    loaded = declare(tmp_path, text)
    assert (loaded.packages, loaded.apt) == (("transformers>=4,<5", "nltk==3.9"), ("git",))


@pytest.mark.parametrize("text", ["packages: ['--pre']\n", "apt: ['-o=x']\n", "requirements: ../x\n"])
def test_packages_that_are_none_are_refused_by_their_line(tmp_path: Path, text: str) -> None:
    """Load invalid packages: ConfigError with line 5."""
    with pytest.raises(ConfigError, match=r"mine/workload.yml:5: "):
        declare(tmp_path, text)


def test_a_script_may_be_declared_to_take_what_deepspeed_and_hugging_face_give(tmp_path: Path) -> None:
    """Load local_rank and deepspeed_option: their values; ConfigError for text in place of true."""
    loaded = declare(tmp_path, "local_rank: true\ndeepspeed_option: deepspeed\n")
    assert (loaded.local_rank, loaded.deepspeed_option) == (True, "deepspeed")
    with pytest.raises(ConfigError, match="`local_rank` must be true or false"):
        declare(tmp_path, "local_rank: 'yes'\n")
