"""Chapter 21 · Gradient compression: send fewer bytes, and keep what was not sent.

The idea. Data parallelism sends every gradient in full, in every step. But training bears noise: a
gradient in 16, 8 or 4 bits, the largest hundredth of it, or only its signs often train as well.
What a scheme leaves out must not be lost: each rank keeps it as a *residual*, and adds it to the
next step's gradient (error feedback). So what is applied in the long run is the whole gradient,
later:

    gradients of all steps  =  what was applied  +  what the residuals of all ranks hold now

Of n float32 numbers, for an all-reduce over P ranks (exact formulas: in each module):

    scheme       bytes that a rank sends          numbers that it keeps     what is left out of a step
    none         2(P-1)/P × 4n                    0                         nothing
    fp16, bf16   2(P-1)/P × 2n                    0                         digits beyond 11, 8
    8bit, 4bit   2(P-1)/P × 1.03n, 0.53n          n + n/P                   digits below the scale of a block
    sign         2(P-1)/P × 0.126n                n + n/P                   all but the sign
    1-bit        as sign, after its warm-up       n + n/P                   all but the sign, of Adam's momentum
    top-k        (P-1) × 8k                       n                         all but the k largest
    threshold    (P-1) × 8k, k varies             n                         all that is small
    adaptive     as top-k, k follows the link     n                         all but the k largest
    random-k     2(P-1)/P × 4k                    n                         all but k, drawn anew
    powersgd     2(P-1)/P × 4r (a + b)            n + r b                   of (a, b) matrices all beyond rank r
    predict      as its codec, or a byte          3n + 2n/P                 what a forecast has right

DDP sends its buckets by a scheme; ZeRO-1 and ZeRO-2 the reduce-scatter of gradients, half of those
bytes, and their all-gather of weights stays as it is, because a replica must not drift; so ZeRO
gains at most a factor of two. With several copies of ZeRO's state the sums between them are
compressed, and those within a copy are not.

notes:   N2 §11.2, §11.4, N3 §3.2
Source:  Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Lin et al. 2018, "Deep Gradient
         Compression"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD".
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.parallel.compress import (
    adaptive,
    casts,
    one_bit_adam,
    powersgd,
    predict,
    quantise,
    random_k,
    sign,
    sparse,
)
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.step import Batch, part_of


def plain_compressed_ddp(
    model: GPT, optimizer: Optimizer, group: Group, batches: Iterable[Batch], density: float
) -> None:
    """Train by DDP that sends only the largest gradients (top-k), and keeps the others for the next
    step (error feedback)."""
    residuals = [np.zeros(p.size, p.dtype) for p in model.parameters()]
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        for p, residual in zip(model.parameters(), residuals, strict=True):
            gradient: Any = p.grad
            residual += gradient.reshape(-1)  # 1 this gradient, and what was not sent before
            k = max(1, round(density * p.size))
            chosen = np.sort(np.argpartition(np.abs(residual), -k)[-k:])  # 2 where it is largest
            places = group.all_gather(chosen, algorithm="ring")  # 3 send only these
            values = group.all_gather(residual[chosen], algorithm="ring")
            residual[chosen] = 0  # 4 the others stay here
            gradient[...] = 0
            # 5 the sum, in rank order: the same on all
            np.add.at(gradient.reshape(-1), places, values)
        optimizer.step()
        optimizer.zero_grad()


# A `Scheme` (step/scheme.py) does this per bucket while backward continues. top-k and threshold
# (sparse.py) keep the all-gather above, with values and uint32 positions in one message. Casts,
# quantised numbers and signs use two_phase.py, which sends each number twice instead of P - 1
# times. Each scheme's module says what it sends and keeps.

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "none": lambda name: Scheme(),
    "fp16": casts.make,
    "bf16": casts.make,
    "8bit": quantise.make,
    "4bit": quantise.make,
    "top-k": sparse.make_top_k,
    "threshold": sparse.make_threshold,
    "random-k": random_k.make,
    "sign": sign.make,
    "1-bit": one_bit_adam.make,
    "powersgd": powersgd.make,
    "predict": predict.make,
    "adaptive": adaptive.make,
}
"""A scheme's name -> its maker, a callable `make(name, **options)`; its keywords are the options,
with their defaults."""


def scheme_of(text: str) -> Scheme:
    """Return the scheme of "NAME" or "NAME:option=value,option=value", not yet attached.

    Raises:  ConfigError for another name, option or value.
    """
    name, colon, rest = text.partition(":")
    if name not in SCHEMES:
        raise ConfigError(
            f"compress {text!r}: there is no scheme {name!r}; choose one of {', '.join(SCHEMES)}"
        )
    if name == "none" and colon:
        raise ConfigError(f"compress {text!r}: none takes no options")
    make = SCHEMES[name]
    return make(name, **(_options(text, rest, make) if colon else {}))


def _options(text: str, rest: str, make: Callable[..., Scheme]) -> dict[str, Any]:
    """Return the options of a text, each of the type of the maker's default for that keyword."""
    known = {
        option: parameter.default
        for option, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    options: dict[str, Any] = {}
    for pair in rest.split(","):
        option, equals, value = pair.partition("=")
        option = option.replace("-", "_")
        if option not in known or not equals:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ConfigError(
                f"compress {text!r}: {pair!r} is not option=value; {text.partition(':')[0]} {takes}"
            )
        if option in options:
            raise ConfigError(f"compress {text!r}: option {option} stands there twice")
        options[option] = _value(text, option, value, known[option])
    return options


def _value(text: str, option: str, value: str, default: Any) -> Any:
    """Return an option's value, of its default's type."""
    try:
        if isinstance(default, bool):
            return {"yes": True, "no": False}[value]
        return value if default is None or isinstance(default, str) else type(default)(value)
    except (KeyError, ValueError):
        wanted = "yes or no" if isinstance(default, bool) else f"like {default}"
        raise ConfigError(f"compress {text!r}: {option}={value!r}; write it {wanted}") from None
