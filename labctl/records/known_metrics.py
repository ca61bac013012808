"""Metrics in a text that a program printed in a known way, such as ``loss: 1.2``, without a declaration.

Only what is sure is taken, as a wrong number is worse than none. A name counts if all of its words are known:
``val_loss`` and ``Train loss`` do, ``value_loss``, ``loss scale`` and ``best loss`` do not. Configurations, options,
file names and tables of classes are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import product
from typing import NamedTuple

# --- names ---------------------------------------------------------------------------------------------------

SAME = {
    "acc": "accuracy",
    "ppl": "perplexity",
    "lr": "learning_rate",
    "gnorm": "grad_norm",
    "gradient": "grad",
    "tflop": "tflops",
    "training": "train",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "evaluation": "eval",
    "testing": "test",
}
"""Other spellings of words in names."""
EVALUATIONS = ("val", "eval", "test")
SPLITS = ("train", *EVALUATIONS)
"""Words for the data that a metric is of."""
NEUTRAL = frozenset(
    (
        *("avg", "avr", "average", "mean", "running", "current", "curr", "cur", "final", "total", "reduced", "global"),
        *("batch", "epoch", "step", "iter", "iteration", "lm", "info", "debug", "warning"),
    )
)
"""Words that change nothing about a name: ``lm loss`` and ``Average loss`` are losses."""
QUANTITIES = frozenset(("loss", "accuracy", "acc1", "acc5", "perplexity", "reward", "reward_score", "throughput"))
BESIDES = frozenset(("learning_rate", "grad_norm", "tflops", "mfu"))
SHORT_RATES = {"tps": "tokens_per_second", "wps": "words_per_second", "/s": "samples_per_second"}
"""Quantities, and short names of rates, that count only beside another metric: alone they may be a setting."""
ITEMS = {
    "sample": "samples",
    "seq": "sequences",
    "sent": "sentences",
    "example": "examples",
    "im": "images",
    "tok": "tokens",
    "word": "words",
    "step": "steps",
    "it": "steps",
}
"""Items that rates count, by the beginnings of their words; in order of preference where a throughput is asked for."""
ITEM = (
    r"(?:samples?|seq(?:uence)?s?|sent(?:ence)?s?|examples?|im(?:age|g)s?|tok(?:en)?s?|words?|steps?"
    r"|it(?:er(?:ation)?s?)?)"
)
SECOND, DEVICE = r"s(?:ec(?:ond)?)?", r"(?:[cghtx]pu|device|chip)"
RATE = re.compile(
    rf"(?:(train|val|eval|test)[_ /])?(?:(?:running|avg|average|mean|total|global|throughput)[_ /]?)*"
    rf"({ITEM})(?:[_ ]?per[_ ]?|/){SECOND}((?:[_ ]?per[_ ]?|/){DEVICE})?"
)
TFLOPS = re.compile(rf"tflops?/s(?:/{DEVICE})?")


def name_of(text: str) -> str:
    """Return the known metric's name that a text means, ``val_loss`` for ``Validation Loss``; empty if it is none."""
    lowered = text.lower()
    if rate := RATE.fullmatch(lowered):
        return _name_of_rate(*rate.groups(""))
    if TFLOPS.fullmatch(lowered):
        return "tflops"
    return SHORT_RATES.get(lowered) or _name_of_words(text)


def _name_of_rate(split: str, item: str, each: str) -> str:
    """Return the name of a rate of items, such as ``train_tokens_per_second_per_device``."""
    items = next(items for start, items in ITEMS.items() if item.startswith(start))
    return "_".join(filter(None, (split, items, "per_second", "per_device" if each else "")))


def _name_of_words(text: str) -> str:
    """Return a metric's name by its words, ``val_loss`` for ``Valid Loss``; empty if it is no known quantity."""
    separate = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text.replace("@", "")).lower()
    words = [SAME.get(word, word) for word in re.split(r"[^a-z0-9]+", separate) if word not in NEUTRAL]
    splits = dict.fromkeys(word for word in words if word in SPLITS)
    quantity = "_".join(word for word in words if word not in SPLITS)
    if quantity in BESIDES:
        return quantity
    if quantity not in QUANTITIES or len(splits) > 1:
        return ""
    return "_".join((*splits, quantity.removesuffix("_score")))


def plain(text: str) -> str:
    """Return a text in small letters with ``_`` for all but letters, digits and dots."""
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")


def found_name(asked: str) -> str:
    """Return the name under which an asked-for metric is found in output: the known one, else the plain text."""
    return name_of(asked) or plain(asked) or asked


def has_split(name: str) -> bool:
    """Tell if a name begins with a word for the data it is of, such as ``train`` or ``val``."""
    return name.partition("_")[0] in SPLITS


def stand_in(name: str, found: Collection[str]) -> str:
    """Return the found metric that another name means, ``train_loss`` for ``loss``; empty if there is none."""
    candidates = [name_of(name)]
    if name == "loss":
        candidates = ["train_loss"]
    elif name == "throughput":
        candidates = [f"{split}{items}_per_second" for items, split in product(ITEMS.values(), ("", "train_"))]
    return next((candidate for candidate in candidates if candidate in found), "")


def unit_of(name: str, rest: str = "") -> str:
    """Return a metric's unit by its name, or ``%`` if the text behind its number begins with it; empty otherwise."""
    if rate := re.search(r"([a-z]+)_per_second", name):
        return f"{rate[1]}/s"
    if name == "tflops":
        return "TFLOP/s"
    return "%" if re.match(r"\s?%", rest) else ""


# --- formats -------------------------------------------------------------------------------------------------

NO_NUMBER = r"(?i:nan|inf)\b"
NUMBER = (
    rf"(?P<number>[-+]?(?:\d+(?:,\d{{3}})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|{NO_NUMBER}))"
    # It is no time, fraction, range, file name, amount of bytes or factor.
    r"(?!\.?\w|\d|[-:/]\d|\.\.\d|\s?\*)"
)
# In `loss nan acc 0.5`, nan is the number of loss, no word of a longer name.
WORDS = rf"[A-Za-z][\w@]*(?:[ /.\-](?!{NO_NUMBER})[A-Za-z][\w@]*){{0,5}}"
# Not within a word, path, option or quoted text.
BEGIN = r"(?<![\w.\-/@'\"=\\$%])"
# Not within a number, nor behind its exponent's sign, nor in a condition such as `> 5 samples/s`.
BEFORE_NUMBER = r"(?<![\w.,/<>])(?<!e[-+])(?<![<>]=)(?<![<>] )(?<![<>]= )"


class Format(NamedTuple):
    """A way to print a metric: a pattern with the groups ``key`` and ``number``; ``example`` names it in records."""

    example: str
    pattern: re.Pattern[str]


DICTIONARY = Format(
    "{'name': 1.2}",
    re.compile(rf"['\"](?P<key>[\w /@.()\-]{{1,60}})['\"]\s?:\s?['\"]?{NUMBER}['\"]?(?=\s*[,}}])"),
)
PAIR = Format(
    "name: 1.2",
    re.compile(
        rf"{BEGIN}(?P<key>{WORDS})(?:\s?\([A-Za-z ]{{1,24}}\))?(?P<sign>\s*[:=]\s*|[ \t]{{1,4}})"
        rf"(?:(?:tensor|Array)\()?{NUMBER}"
    ),
)
DEEPSPEED = Format("step=1, skipped=0, lr=[1e-5]", re.compile(rf"\bstep=\d+, skipped=\d+, (?P<key>lr)=\[{NUMBER}"))
WITH_UNIT = Format(
    "1.2 samples/s",
    re.compile(
        rf"{BEFORE_NUMBER}(?P<number>\d+(?:[.,]\d+)*) ?(?P<key>{ITEM}/{SECOND}(?: per {DEVICE})?)\b(?!\s*[:=]?\s*\d)",
        re.IGNORECASE,
    ),
)
FORMATS = (
    DICTIONARY,
    WITH_UNIT,
    Format("1.2/s", re.compile(rf"{BEFORE_NUMBER}(?P<number>\d+\.\d+)(?P<key>/s)\b(?!/)")),
    Format("| name | 1.2 |", re.compile(rf"^\s*[|│┃]\s*(?P<key>{WORDS})\s*[|│┃]\s*{NUMBER}\s*[|│┃]\s*$")),
    DEEPSPEED,
    Format("Total img/sec on 2 GPU(s): 1.2", re.compile(rf"\bTotal (?P<key>{ITEM}/sec) on \d+ \w+\(s\): {NUMBER}")),
    PAIR,
)
"""Formats of metrics, the surest first."""

# Options and their echo, and the arguments of a program.
SETTING = re.compile(r"^\s*-{1,2}[A-Za-z]|^\s*usage:|\bNamespace\(|\(default:", re.IGNORECASE)
CALL = re.compile(r"\w\([^()]*$")
SHARE = re.compile(r"acc|mfu")
OF_CLASS = re.compile(r"\b(?:class|label|category)\b", re.IGNORECASE)
# Words for evaluation, and TensorFlow's for its results.
EVALUATION = re.compile(
    r"(?<![\w/.\-])(eval(?:uation|uating)?|val(?:id(?:ation|ating)?)?|dev|test(?:ing)?|saving dict)(?![\w/.\-])",
    re.IGNORECASE,
)


class Match(NamedTuple):
    """A number found in a text: its name, unit, format, its place, and whether it counts alone."""

    name: str
    value: float
    unit: str
    example: str
    begin: int
    end: int
    counts_alone: bool = True


def matches(text: str, asked: Collection[str] = ()) -> list[Match]:
    """Return the metrics printed in a text, each by its first number; [] for a setting or only side values."""
    if SETTING.search(text):
        return []
    found: dict[str, Match] = {}
    taken: set[int] = set()
    for form in FORMATS:
        for match in form.pattern.finditer(text):
            name, end = _name_in(match["key"], asked), match.end("number")
            # A number in two formats, as that of `Throughput: 1.2 samples/s`, counts by the surer one.
            if name and name not in found and end not in taken and not _is_setting(form, name, match):
                with suppress(ValueError):
                    found[name] = _match_of(form, name, match)
            if name:
                taken.add(end)
    if not any(match.counts_alone for match in found.values()):
        return []
    return list(_named_by_context(found.values(), text))


def _name_in(key: str, asked: Collection[str]) -> str:
    """Return the name of a metric that is known or among ``asked``; empty for others."""
    return name_of(key) or (plain(key) if plain(key) in asked else "")


def _match_of(form: Format, name: str, match: re.Match[str]) -> Match:
    """Return the metric of a match with value and unit. ValueError if its number is not one, such as ``1.2.3``."""
    is_beside = name in BESIDES or match["key"].lower() in SHORT_RATES
    return Match(
        name=name,
        value=float(match["number"].replace(",", "")),
        unit=unit_of(name, match.string[match.end() :]),
        example=form.example,
        begin=match.start(),
        end=match.end("number"),
        counts_alone=form is DEEPSPEED or not is_beside,
    )


def _is_setting(form: Format, name: str, match: re.Match[str]) -> bool:
    """Tell if a match is no metric: an argument, one class's figure, a share, nested, or a count in a sentence."""
    before, rest = match.string[: match.start()], match.string[match.end() :]
    if CALL.search(before) or ("acc" in name and OF_CLASS.search(before)):
        return True
    if unit_of(name, rest) == "%" and not SHARE.search(name):
        return True
    if form is DICTIONARY:
        return before.count("{") - before.count("}") != 1
    is_sentence = form is PAIR and not match["sign"].strip() and not unit_of(name)
    return is_sentence and not re.search(r"[.enEN]", match["number"])


def _named_by_context(found: Collection[Match], text: str) -> Iterator[Match]:
    """Yield the metrics; those behind a word for evaluation get ``val_``, ``eval_`` or ``test_`` in their name."""
    beside = list(text)
    for match in found:
        beside[match.begin : match.end] = " " * (match.end - match.begin)
    word = EVALUATION.search("".join(beside))
    for match in found:
        yield of_evaluation(match, split_of(word[1])) if word and word.start() < match.begin else match


def of_evaluation(match: Match, split: str) -> Match:
    """Return a metric renamed to ``SPLIT_name``; unchanged if it has a split or is a side value."""
    if match.name in BESIDES or has_split(match.name):
        return match
    return match._replace(name=f"{split}_{match.name}")


def split_of(word: str) -> str:
    """Return ``val``, ``test`` or ``eval`` for a word about evaluation, by its first letter."""
    return {"v": "val", "d": "val", "t": "test"}.get(word[0].lower(), "eval")
