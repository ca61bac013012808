"""One line of what a training takes in memory, and the counts that several lines are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from labctl.fit.training import Model, Training

PHASES = ("build", "generate", "forward", "backward", "step")
"""RLHF generates answers before it learns from them; no other task does."""
Place = Literal["device", "host"]

ZERO = "Rajbhandari et al. 2020 (ZeRO), section 3.1 and, for the division among ranks, section 5"
STAGES = ("deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py")

SYMBOLS = """\
P parameters, T those trained, F those of models that are only asked, L elements of the largest tensor,
w bytes of a weight, N ranks, s sequence length, a answer length, b sequences of a forward pass,
l layers, h hidden size, f width of the perceptron, v vocabulary"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes per rank of one part of the memory, in each phase."""

    part: str
    formula: str
    source: str
    build: int = 0
    generate: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0
    place: Place = "device"

    def during(self, phase: str) -> int:
        return int(getattr(self, phase))

    def plus(self, other: Line) -> Line:
        """The same part with the other's bytes as well."""
        return replace(
            self,
            build=self.build + other.build,
            generate=self.generate + other.generate,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            step=self.step + other.step,
        )


def peak(parts: tuple[Line, ...], *places: Place) -> tuple[int, str]:
    """Bytes per rank in these places, in the phase that takes most, and that phase."""
    return max((sum(line.during(phase) for line in parts if line.place in places), phase) for phase in PHASES)


def summed(parts: Iterable[Line]) -> tuple[Line, ...]:
    """Lines of the same part, formula and place as one."""
    found: dict[tuple[str, str, Place], Line] = {}
    for line in parts:
        key = line.part, line.formula, line.place
        before = found.get(key)
        found[key] = before.plus(line) if before else line
    return tuple(found.values())


def always(part: str, formula: str, source: str, size: int, place: Place = "device") -> Line:
    """A part that is there all through a step."""
    return Line(part=part, formula=formula, source=source, forward=size, backward=size, step=size, place=place)


# --- counts --------------------------------------------------------------------------------------------------


def share(training: Training, model: Model, size: int, stage: int) -> int:
    """The bytes of one rank, where ZeRO divides this from the given stage on."""
    return -(-size // training.ranks) if model.stage >= stage else size


def largest(model: Model) -> int:
    """Elements of the largest tensor that is trained."""
    return min(model.shape.largest, model.trained)


def stepped(training: Training, model: Model) -> tuple[int, str]:
    """Elements that ZeRO's optimiser updates at once, and as a formula: this rank's share, in stage 3 by groups."""
    elements = share(training, model, model.trained, 1)
    return (
        (min(elements, training.sub_group), "min(T / N, sub_group_size)") if model.stage == 3 else (elements, "T / N")
    )


def bucket(training: Training, model: Model) -> tuple[int, str]:
    """Bytes of a bucket: torch.empty takes all of it, on a CPU only what is written to; and as a formula."""
    if training.accelerator == "cpu":
        return training.width * min(model.trained, training.reduce_bucket), "w min(T, reduce_bucket_size)"
    return training.width * training.reduce_bucket, "w reduce_bucket_size"
