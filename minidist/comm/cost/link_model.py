"""What a message costs on this machine, as numbers: the α-β model, fitted to measurements, kept in
a file.

    seconds = waits·α + (messages - waits)·o + bytes moved·β + bytes added·γ + bytes crowded·κ

α is the latency of a message that must arrive before the next one leaves; o the cost of one more
message that waits for no other; β the time of a byte, 1/bandwidth; γ the additional time to add a
byte instead of storing it; κ the additional time of a byte that is sent to all others at once.
`minidist bench calibrate` fits them for each transport and stores the profile; rank 0 reads it when
the job meets, tells the others, and `auto` (collectives/select.py) predicts each algorithm's time
with it (critical_path.py).

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
WORST_MISFIT = 0.5  # of an entry of a profile that nothing is said of
NETWORK = "network"
"""The link class of a group whose ranks are on several hosts, whatever the transport is called."""


class LinkWork(NamedTuple):
    """What one rank does in a call, one thing after the other, on the path that takes longest."""

    waits: float  # messages that each wait for the one before
    messages: float  # messages in all, at least `waits`
    moved: float  # bytes sent; as many may come in meanwhile
    added: float  # bytes that are added to others as they arrive
    crowded: float = 0.0  # bytes that are sent to several ranks at once


class Sample(NamedTuple):
    """A measurement."""

    work: LinkWork
    seconds: float


@dataclass(frozen=True)
class LinkCost:
    """The five numbers of one link class among so many ranks, in seconds and seconds a byte."""

    link: str  # "shm", "tcp", ..., or "network"
    ranks: int  # how many exchanged at once: where they outnumber the cores, all numbers are larger
    alpha: float
    overhead: float
    beta: float
    gamma: float
    misfit: float  # the worst |fitted / measured - 1| of the samples
    crowd: float = 0.0
    # what a call of a training step takes beside its messages; only `here` counts it
    call: float = 0.0
    # the same of a call of two of the ranks: it need not wait until all had a core
    pair: float = 0.0
    # by which kernels take longer where so many ranks train, or shorter; only for `here`
    slowdown: float = 1.0

    def seconds(self, work: LinkWork) -> float:
        """What the model says that this work takes."""
        return (
            work.waits * self.alpha
            + (work.messages - work.waits) * self.overhead
            + work.moved * self.beta
            + work.added * self.gamma
            + work.crowded * self.crowd
        )


@dataclass(frozen=True)
class ComputationCost:
    """What kernels cost where so many ranks compute at once (chapter 24; bench/computation.py
    measures it)."""

    ranks: int
    peaks: dict[str, float]  # FLOP/s of an endless matrix product, by dtype
    half: float  # the size at which a product's third of a side halves that (simulate/rates.py)
    launch: float  # seconds of a kernel of no work, as NumPy calls it
    bandwidth: float  # bytes a second
    cache_bytes: float  # arrays of no more are faster,
    cache_factor: float  # by this
    misfit: float  # the worst |fitted / measured - 1|
    python: float = 0.0  # seconds of Python for one result of an op, in a step
    # products of matrices of no more bytes together lose nothing by their size
    small_bytes: float = 0.0
    # seconds until NumPy's innermost loop has started, which views with gaps do often
    loop: float = 0.0
    # seconds a byte that a step's products find outside the cache, beside the product
    cold: float = 0.0
    matrix: float = 0.0  # seconds of each matrix of a stack, beside its product


class _ComputationTold(msgspec.Struct):
    """A ComputationCost."""

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
    """The measured links, one for each link class and rank count, and the machine, as `minidist
    bench` describes it.

    Attributes: computation  for each number of ranks that computed at once; empty if it was not
                             measured
    """

    links: Sequence[LinkCost]
    machine: dict[str, Any]
    computation: tuple[ComputationCost, ...] = ()

    def link(self, transport: str, nodes: Sequence[int]) -> LinkCost | None:
        """The costs within a group: of its link class, measured with as many ranks or the next
        fewer; None if never.

        Args:    nodes: the machine of each of the group's ranks, as groups number them.
        """
        name = NETWORK if len(set(nodes)) > 1 else transport
        measured = [cost for cost in self.links if cost.link == name]
        fewer = [cost for cost in measured if cost.ranks <= len(nodes)]
        if fewer:
            return max(fewer, key=lambda cost: cost.ranks)
        return min(measured, key=lambda cost: cost.ranks, default=None)

    def misses(self) -> list[str]:
        """In words, each entry that misses a measured time by more than half of it."""
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
        """This profile, and what the one in `path` has of other links or rank counts; if it is of
        the same machine."""
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
        """For the file, and for the other ranks."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "links": [asdict(cost) for cost in self.links],
            "computation": [asdict(cost) for cost in self.computation],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Profile":
        """The profile that as_json gave. Raises: ConfigError that says in a few words what is wrong
        with it."""
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
                "its computation has not just the numbers that calibrate writes"
            ) from error
        return cls([_link(entry) for entry in links], value["machine"], computation)


def _link(entry: Any) -> LinkCost:
    names = {field.name for field in fields(LinkCost)}
    if isinstance(entry, dict):
        entry = {"call": 0.0, "pair": entry.get("call", 0.0), **entry}  # an older profile has none
    if not isinstance(entry, dict) or set(entry) != names:
        raise ConfigError(f"a link has not just {', '.join(sorted(names))}")
    numbers = [entry[name] for name in names - {"link"}]
    if not isinstance(entry["link"], str) or not all(
        type(number) in (int, float) and 0 <= number < 1e300 for number in numbers
    ):
        raise ConfigError(f"a number of link {entry['link']!r} is none, or below 0")
    if type(entry["ranks"]) is not int:
        raise ConfigError(
            f"link {entry['link']!r} has {entry['ranks']!r} ranks, which is no whole number"
        )
    # its old name
    return LinkCost(**{**entry, "link": "tcp" if entry["link"] == "sockets" else entry["link"]})


# ---------------------------------------------------------------- the file


def profile_path() -> Path:
    """Where this user's profile is: ~/.config/minidist/profile.json, or where XDG_CONFIG_HOME has
    it."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "minidist" / "profile.json"


def load_profile(path: Path | None = None) -> Profile | None:
    """The profile in `path`, or the user's; None if there is none. Raises: ConfigError if the file
    is no profile."""
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
    """Write the profile; a reader finds the old file or the new one. Raises: OSError if it cannot
    be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as draft:
        draft.write_text(json.dumps(profile.as_json(), indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the fit


def fit(link: str, ranks: int, samples: Iterable[Sample]) -> LinkCost:
    """The five numbers, none below 0, that come closest to the samples.

    Weighted least squares: the sum of (fitted/measured - 1)² is least, so that a microsecond
    message counts as much as a millisecond one. A number that would come out below 0 is set to 0,
    and the others are fitted again.
    """
    rows = np.array(
        [
            [work.waits, work.messages - work.waits, work.moved, work.added, work.crowded, seconds]
            for work, seconds in samples
        ],
        np.float64,
    )  # (samples, 6)
    relative = rows[:, :5] / rows[:, 5:]  # what each number adds, of what was measured
    scale = np.abs(relative).max(axis=0)  # seconds and seconds a byte differ by 1e5
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
