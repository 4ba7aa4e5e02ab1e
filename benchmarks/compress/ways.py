"""The ways of `minidist bench compress`: a scheme of chapter 21 from its text, or local steps.

none   top-k:density=0.01   1-bit:warmup=100   local-steps:every=25,fragments=5,delay=2,compress=4bit
"""

import argparse
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from minidist.errors import ConfigError
from minidist.parallel.compress.compress import SCHEMES, scheme_of
from minidist.parallel.hybrid.plan import Plan

PLAIN = "none"
LOCAL_STEPS = "local-steps"
OPTIONS: dict[str, tuple[str, type]] = {
    "every": ("local_steps", int),
    "outer": ("outer", str),
    "lr": ("outer_lr", float),
    "momentum": ("outer_momentum", float),
    "fragments": ("fragments", int),
    "delay": ("delay", int),
    "mix": ("mix", float),
    "compress": ("outer_compress", str),
    "rate": ("rate", float),
}
"""Options of local steps: {option of a way: (attribute of Plan, type)}; only rate is
SendingWay's."""

# 1-bit Adam's default warm-up: a fifth of the steps, as in the paper
WARMUP_SHARE = 5


@dataclass(frozen=True)
class SendingWay:
    """A way of sending gradients.

    Attributes: text: as written; period: steps after which the times of steps repeat (local steps:
                H)
                warmup: 1-bit Adam's number of first steps, which take as long as those of `none`
                rate: the learning rate, as a multiple of the others': with local steps a rank has a
                smaller batch, so its Adam divides by a larger sqrt(v)
    """

    text: str
    period: int = 1
    warmup: int = 0
    rate: float = 1.0

    @property
    def name(self) -> str:
        """The scheme's name, without its options."""
        return self.text.partition(":")[0]

    @property
    def follows_link(self) -> bool:
        """True if the losses depend on the link, so that a curve of another link is not valid."""
        return self.name == "adaptive"

    def plan(self, ranks: int) -> Plan:
        """Return the plan of a job that trains this way. Raises: PlanError, ConfigError for options
        that cannot work."""
        if self.name != LOCAL_STEPS:
            return Plan(dp=ranks, compress=self.text)
        options = {"outer": "nesterov", "local_steps": self.period, **_local_options(self.text)}
        options.pop("rate", None)
        return Plan(dp=ranks, **options)

    def timed(self) -> "SendingWay":
        """Return the same way after its warm-up, for the time of a step."""
        return replace(self, text="1-bit:warmup=1") if self.warmup else self

    def seconds(self, steps: float, step: float, plain_step: float) -> float:
        """Return the seconds of the first `steps` steps. Args: step: seconds of a step after the
        warm-up; plain_step: of `none`."""
        warm = min(self.warmup, steps)
        return warm * plain_step + (steps - warm) * step


def way_of(text: str, steps: int) -> SendingWay:
    """Return the way from its text, for a training of `steps` steps.

    Raises:  ConfigError for another name or option.
    """
    name, _, rest = text.partition(":")
    if name == LOCAL_STEPS:
        options = {"local_steps": 25, **_local_options(text)}
        way = SendingWay(text, period=options["local_steps"], rate=options.get("rate", 1.0))
        if not 0 < way.rate < inf:
            raise ConfigError(
                f"{text!r}: rate={way.rate:g}; choose a factor of the learning rate above 0"
            )
        way.plan(2)  # raises for options that contradict each other
        return way
    if name == "1-bit":
        text = (
            text
            if "warmup" in rest
            else f"{text}{',' if rest else ':'}warmup={max(1, steps // WARMUP_SHARE)}"
        )
        scheme: Any = scheme_of(text)
        return SendingWay(text, warmup=scheme.warmup)
    scheme_of(text)
    return SendingWay(text)


def _local_options(text: str) -> dict[str, Any]:
    """Return the attributes of Plan that a text names: "local-steps:every=25,lr=0.7"."""
    options = {}
    for word in filter(None, text.partition(":")[2].split(",")):
        option, _, value = word.partition("=")
        try:
            name, kind = OPTIONS[option]
            options[name] = kind(value)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{text!r}: {word!r} is no option of local steps; write "
                f"{'=, '.join(OPTIONS)}= with a value"
            ) from error
    return options


def split_ways(text: str) -> list[str]:
    """Return the text of each way of 'none,top-k:density=0.01,momentum=0.5,sign'; a word with = but
    without : is an option of the way before it."""
    words: list[str] = []
    for word in text.split(","):
        if words and "=" in word and ":" not in word:
            words[-1] += f",{word}"
        else:
            words.append(word)
    for word in words:
        if (name := word.partition(":")[0]) not in (*SCHEMES, LOCAL_STEPS):
            raise argparse.ArgumentTypeError(
                f"no way {name!r}; choose of {', '.join((*SCHEMES, LOCAL_STEPS))}"
            )
    return words
