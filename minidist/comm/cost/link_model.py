"""The cost of a message on this machine as numbers: the α-β model, fitted to measurements, kept in
a file.

    seconds = waits·α + (messages - waits)·o + bytes moved·β + bytes added·γ + bytes crowded·κ

α is the latency of a message that must arrive before the next one leaves; o the cost of one more
message that waits for no other; β the time of a byte, 1/bandwidth; γ the additional time to add a
byte instead of storing it; κ the additional time of a byte that is sent to all others at once.
`minidist bench calibrate` fits them for each transport and stores the profile; rank 0 reads it when
the job starts and sends it to the others, and `auto` (collectives/select.py) predicts each
algorithm's time with it (critical_path.py).

notes: N4 §2.    Source: Hockney 1994 (α, β); Culler et al. 1993 (o).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from minidist.errors import ConfigError
from minidist.files import user_folder, whole
from minidist.reading import NotNegative, Positive, read_json, require

FORMAT = 1
MOST_BYTES = 16 << 20  # of a profile
WORST_MISFIT = 0.5  # maximum misfit of a profile's entry without a warning
NETWORK = "network"
"""The link class of a group with ranks on several hosts, for any transport."""


class LinkWork(NamedTuple):
    """The sequential work of one rank in a call, on the path that takes longest."""

    waits: float  # messages that each wait for the previous message
    messages: float  # messages in all, at least `waits`
    moved: float  # bytes sent; the same number may arrive meanwhile
    added: float  # bytes that are added to others when they arrive
    crowded: float = 0.0  # bytes that are sent to several ranks at once


class Sample(NamedTuple):
    """The work and the measured seconds of a call."""

    work: LinkWork
    seconds: float


@dataclass(frozen=True)
class LinkCost:
    """The numbers of one link class for a number of ranks, in seconds and seconds per byte."""

    link: str  # "shm", "tcp", ..., or "network"
    ranks: int  # ranks that exchanged at once: if they outnumber the cores, all numbers are larger
    alpha: float
    overhead: float
    beta: float
    gamma: float
    misfit: float  # the worst |fitted / measured - 1| of the samples
    crowd: float = 0.0
    # time of a call of a training step in addition to its messages; only `here` counts it
    call: float = 0.0
    # the same for a call of two of the ranks, which need not wait until all ranks had a core
    pair: float = 0.0
    # factor on the time of kernels when this number of ranks trains; only for `here`
    slowdown: float = 1.0

    def seconds(self, work: LinkWork) -> float:
        """Return the model's time for this work."""
        return (
            work.waits * self.alpha
            + (work.messages - work.waits) * self.overhead
            + work.moved * self.beta
            + work.added * self.gamma
            + work.crowded * self.crowd
        )


@dataclass(frozen=True)
class ComputationCost:
    """The cost of kernels when a number of ranks compute at once (chapter 24; bench/computation.py
    measures it)."""

    ranks: int
    peaks: dict[str, float]  # FLOP/s of an endless matrix product, by dtype
    half: float  # products with sides of 3·half run at half of the peak (simulate/rates.py)
    launch: float  # seconds of a kernel without work, as NumPy calls it
    bandwidth: float  # bytes per second
    cache_bytes: float  # arrays up to this size are faster,
    cache_factor: float  # by this factor
    misfit: float  # the worst |fitted / measured - 1|
    python: float = 0.0  # seconds of Python for one result of an op, in a step
    # products of matrices with at most this sum of bytes lose no speed by their size
    small_bytes: float = 0.0
    # seconds until NumPy's innermost loop has started, which happens often for views with gaps
    loop: float = 0.0
    # seconds per byte that a step's products read from outside the cache, beyond the product's time
    cold: float = 0.0
    matrix: float = 0.0  # seconds of each matrix of a stack, in addition to its product


class _ComputationTold(msgspec.Struct):
    """The stored form of a ComputationCost."""

    ranks: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    peaks: dict[str, Positive]
    half: NotNegative
    launch: NotNegative
    bandwidth: Positive
    cache_bytes: NotNegative
    cache_factor: Positive
    misfit: NotNegative
    python: NotNegative = 0.0
    small_bytes: NotNegative = 0.0
    loop: NotNegative = 0.0
    cold: NotNegative = 0.0
    matrix: NotNegative = 0.0


class _ProfileTold(msgspec.Struct):
    machine: dict[str, Any]
    computation: list[_ComputationTold] = []


@dataclass(frozen=True)
class Profile:
    """The measured links, one for each link class and number of ranks, and the machine, as
    `minidist bench` describes it.

    Attributes: computation  for each number of ranks that computed at once; empty if not measured
    """

    links: Sequence[LinkCost]
    machine: dict[str, Any]
    computation: tuple[ComputationCost, ...] = ()

    def link(self, transport: str, nodes: Sequence[int]) -> LinkCost | None:
        """Return the costs within a group: of its link class, measured with the same number of
        ranks, else the next smaller number, else the smallest; None if not measured.

        Args:    nodes: the machine of each of the group's ranks, numbered as in groups.
        """
        name = NETWORK if len(set(nodes)) > 1 else transport
        measured = [cost for cost in self.links if cost.link == name]
        fewer = [cost for cost in measured if cost.ranks <= len(nodes)]
        if fewer:
            return max(fewer, key=lambda cost: cost.ranks)
        return min(measured, key=lambda cost: cost.ranks, default=None)

    def misses(self) -> list[str]:
        """Return a text for each entry that misses a measured time by more than half of it."""
        links = [(f"{cost.link} among {cost.ranks} ranks", cost.misfit) for cost in self.links]
        computation = [
            (f"computation of {cost.ranks} at once", cost.misfit) for cost in self.computation
        ]
        return [
            f"{what} by {misfit:.0%}"
            for what, misfit in links + computation
            if misfit > WORST_MISFIT
        ]

    def beside(self, path: Path) -> "Profile":
        """Return this profile with the entries of the one in `path` for other links or numbers of
        ranks, if it is of the same machine."""
        try:
            older = load_profile(path)
        except ConfigError:  # about to be replaced
            older = None
        if older is None or any(
            older.machine.get(name) != self.machine.get(name) for name in ("processor", "cores")
        ):
            return self
        measured = {(cost.link, cost.ranks) for cost in self.links}
        kept = [cost for cost in older.links if (cost.link, cost.ranks) not in measured]
        counts = {cost.ranks for cost in self.computation}
        computation = tuple(cost for cost in older.computation if cost.ranks not in counts)
        return Profile([*kept, *self.links], self.machine, computation + self.computation)

    def as_json(self) -> dict[str, Any]:
        """Return the value for the file, and for the other ranks."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "links": [asdict(cost) for cost in self.links],
            "computation": [asdict(cost) for cost in self.computation],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Profile":
        """Return the profile that as_json gave. Raises: ConfigError that says in a few words what
        is wrong with it."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ConfigError(f'it does not say "format": {FORMAT}')
        links = value.get("links")
        if not isinstance(links, list) or not isinstance(value.get("machine"), dict):
            raise ConfigError("it lacks its links or its machine")
        try:
            require(value, _ProfileTold)
            computation = tuple(ComputationCost(**entry) for entry in value.get("computation", ()))
        except (TypeError, ConfigError) as error:
            raise ConfigError(
                "its computation must have exactly the numbers that calibrate writes"
            ) from error
        return cls([_link(entry) for entry in links], value["machine"], computation)


def _link(entry: Any) -> LinkCost:
    names = {field.name for field in fields(LinkCost)}
    if isinstance(entry, dict):
        entry = {"call": 0.0, "pair": entry.get("call", 0.0), **entry}  # an older profile has none
    if not isinstance(entry, dict) or set(entry) != names:
        raise ConfigError(f"a link must have exactly the fields {', '.join(sorted(names))}")
    numbers = [entry[name] for name in names - {"link"}]
    if not isinstance(entry["link"], str) or not all(
        type(number) in (int, float) and 0 <= number < 1e300 for number in numbers
    ):
        raise ConfigError(f"a number of link {entry['link']!r} is missing or below 0")
    if type(entry["ranks"]) is not int:
        raise ConfigError(
            f"link {entry['link']!r} has {entry['ranks']!r} ranks, which is no whole number"
        )
    # its old name
    return LinkCost(**{**entry, "link": "tcp" if entry["link"] == "sockets" else entry["link"]})


# ---------------------------------------------------------------- the file


def profile_path() -> Path:
    """Return the path of this user's profile: ~/.config/minidist/profile.json, or under
    XDG_CONFIG_HOME."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "minidist" / "profile.json"


def load_profile(path: Path | None = None) -> Profile | None:
    """Return the profile in `path`, or the user's; None if there is none. Raises: ConfigError if
    the file is not a profile."""
    try:
        file = path or profile_path()
    except ConfigError:  # a user without a home has none
        return None
    try:
        return Profile.from_json(read_json(file, most=MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ConfigError(
            f"the communication profile {file} cannot be used: {why}; run `minidist bench "
            "calibrate` again, or delete it"
        ) from error


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile; a reader sees the old file or the new one, never a part. Raises: OSError
    if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as draft:
        draft.write_text(json.dumps(profile.as_json(), indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the fit


def fit(link: str, ranks: int, samples: Iterable[Sample]) -> LinkCost:
    """Return the numbers of a link, none below 0, that fit the samples best.

    Weighted least squares: the sum of (fitted/measured - 1)² is minimal, so that a microsecond
    message counts as much as a millisecond one. If a number would be below 0, it is set to 0 and
    the others are fitted again.
    """
    rows = np.array(
        [
            [work.waits, work.messages - work.waits, work.moved, work.added, work.crowded, seconds]
            for work, seconds in samples
        ],
        np.float64,
    )  # (samples, 6)
    relative = rows[:, :5] / rows[:, 5:]  # each number's share of the measured time
    scale = np.abs(relative).max(axis=0)  # seconds and seconds per byte differ by 1e5
    free = [column for column in range(5) if scale[column]]
    numbers = np.zeros(5)
    while free:
        numbers[:] = 0
        solved, *_ = np.linalg.lstsq(
            relative[:, free] / scale[free], np.ones(len(rows)), rcond=None
        )
        numbers[free] = solved / scale[free]
        if solved.min() >= 0:
            break
        free.remove(free[int(solved.argmin())])
    misfit = float(np.abs(relative @ numbers - 1).max())
    alpha, overhead, beta, gamma, crowd = np.maximum(numbers, 0).tolist()
    return LinkCost(link, ranks, alpha, overhead, beta, gamma, misfit, crowd)
