"""Chapter 24 · Days, joules and money for a number of tokens; on own machines, in the cloud, and on
spot machines with interruptions.

    found = forecast(choice, ranking, tokens=300e9, interruptions_a_day=6)
    found.days, found.own.dollars, found.cloud.dollars, found.spot.dollars, found.spot.days
    found.premises                      # every number that it uses, with its source or "assumed"

A spot machine costs a part of the price and may be taken away. The job saves every √(2 δ M) seconds
(survive/interval.py): a save takes δ seconds, and the mean time between interruptions is M; goodput
is the share of the time that is left for work.

notes: N2 §12.4.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.plan.ranking import Choice, Ranking
from minidist.survive.interval import best_interval, goodput

DAY = 86400.0
HOUR = 3600.0
KWH = 3.6e6
SAVED_BYTES = 12  # per weight in a checkpoint: master, m and v in float32 (lesson 26)
ASSUMED = "assumed"
SPOT_INTERRUPTIONS = 4.0  # per day, for a job on spot machines: assumed


class Premise(NamedTuple):
    """A number that a forecast uses. Attributes: source: its source, or ASSUMED."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Prices:
    """Prices and failure rates of machines. Each default has a source, or is an assumption that the
    report names.

    Attributes: spot       price of a spot machine / the cloud's price
                own        price of an own machine at full use / the cloud's price
                kwh        dollars per kilowatt-hour, for own machines
                save       seconds for which a checkpoint stops training; None: computed from the
                           state's bytes, where each node writes its part to its own disk (tier.disk
                           of clusters.toml)
                restart    seconds from an interruption until work continues
                failures   interruptions per day of a thousand devices that are not spot machines
    """

    spot: float = 0.4
    own: float = 0.35
    kwh: float = 0.0895
    save: float | None = None
    restart: float = 300.0
    failures: float = 419 / 54 / 16.384

    @classmethod
    def given(cls, words: list[str]) -> "Prices":
        """Return prices from ["spot=0.3", "restart=600"]. Raises: ConfigError for another name, or
        a number that is not above 0."""
        known = [field.name for field in fields(cls)]
        found = {}
        for word in words:
            name, _, text = word.partition("=")
            if name not in known:
                raise ConfigError(
                    f"--assume {word}: there is no {name!r}{meant(name, known)}; write one of "
                    f"{', '.join(known)}, as spot=0.3"
                )
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = 0.0
            if not 0 < found[name] < float("inf"):
                raise ConfigError(
                    f"--assume {word}: {text!r} is not a number above 0; write {name}=0.3"
                )
        return cls(**found)


UNITS = {
    "spot": "of the cloud's price",
    "own": "of the cloud's price",
    "kwh": "dollars a kWh",
    "save": "s that training stands still for a save",
    "restart": "s until work goes on",
    "failures": "interruptions a day of 1,000 devices",
}
SOURCES = {
    "spot": "Google Cloud documentation, 2024, Spot VMs: 60 to 91 % less; here the least",
    "kwh": "EIA, Electric Power Annual 2023: commercial customers in Virginia",
    "failures": "Llama team 2024, section 3.3.4: 419 in 54 days on 16,384 GPUs",
}
"""Sources of the defaults. A default without a source is assumed."""
SAVE_SOURCE = (
    "12 bytes a weight, written by all nodes at the bandwidth of clusters.toml's tier.disk"
)
SAVE_WITHOUT_DISK = 30.0  # seconds, for a cluster without a stated disk (`here`): assumed


@dataclass(frozen=True)
class Offer:
    """A way to get the machines. Attributes: interval: seconds between checkpoints; goodput:
    share of the time that is kept work; dollars: None if no source states the price.
    """

    name: str
    days: float
    dollars: float | None
    goodput: float
    interval: float


@dataclass(frozen=True)
class TokenForecast:
    """Time, energy and cost of a training run.

    Attributes: days: without interruptions; joules: None if no source states the watts.
    """

    tokens: float
    steps: float
    days: float
    joules: float | None
    own: Offer
    cloud: Offer
    spot: Offer
    premises: tuple[Premise, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {**asdict(self), "premises": [premise._asdict() for premise in self.premises]}


def forecast(
    choice: Choice,
    ranking: Ranking,
    *,
    tokens: float,
    interruptions_a_day: float = SPOT_INTERRUPTIONS,
    prices: Prices | None = None,
) -> TokenForecast:
    """Return time, energy and cost of a training run of a number of tokens.

    Args:    tokens: of the whole run; interruptions_a_day: of the spot job as a whole.
    Raises:  ConfigError for rates that are not above 0.
    """
    asked = prices or Prices()
    prices = (
        asked if asked.save else replace(asked, save=save_seconds(ranking) or SAVE_WITHOUT_DISK)
    )
    size = choice.plan.size
    spent = choice.known_seconds
    steps = tokens / (ranking.batch * ranking.config.context)
    days = steps * spent / DAY
    price = ranking.cluster.device.price_an_hour
    failures = prices.failures * size / 1000
    a_step = choice.confirmed.joules if choice.confirmed else choice.joules
    joules = None if a_step is None else a_step * steps

    def offer(name: str, part: float, a_day: float, power: float = 0.0) -> Offer:
        interval, kept = _kept(a_day, prices)
        taken = days / kept if kept else float("inf")
        money = None if price is None else size * price * part * taken * DAY / HOUR + power
        return Offer(name, taken, money, kept, interval)

    power = 0.0 if joules is None else joules / KWH * prices.kwh
    return TokenForecast(
        tokens,
        steps,
        days,
        joules,
        offer("own", prices.own, failures, power),
        offer("cloud", 1.0, failures),
        offer("spot", prices.spot, interruptions_a_day + failures),
        _premises(asked, prices, ranking, interruptions_a_day),
    )


def save_seconds(ranking: Ranking) -> float | None:
    """Return the seconds of a checkpoint that all nodes write at once, each to its own disk; None
    if the cluster states no disk."""
    disk = ranking.cluster.tiers.get("disk")
    if disk is None:
        return None
    return (
        disk.alpha + SAVED_BYTES * ranking.config.numbers / ranking.cluster.nodes / disk.bandwidth
    )


def _premises(
    asked: Prices, prices: Prices, ranking: Ranking, interruptions_a_day: float
) -> tuple[Premise, ...]:
    """Return all numbers of the forecast that neither the plan nor the replay gives."""
    cluster = ranking.cluster
    usual = Prices()
    found = []
    if cluster.device.price_an_hour is not None:
        found.append(
            Premise(
                "price",
                cluster.device.price_an_hour,
                "dollars a device and hour in the cloud",
                cluster.sources.get("price_an_hour", "the cluster's file"),
            )
        )
    for name, unit in UNITS.items():
        source = SOURCES.get(name, ASSUMED)
        if name == "save" and asked.save is None and "disk" in cluster.tiers:
            source = SAVE_SOURCE
        elif getattr(asked, name) != getattr(usual, name):
            source = "given"
        found.append(Premise(name, getattr(prices, name), unit, source))
    source = ASSUMED if interruptions_a_day == SPOT_INTERRUPTIONS else "given"
    return (
        *found,
        Premise("interruptions", interruptions_a_day, "a day of the job on spot machines", source),
    )


def _kept(a_day: float, prices: Prices) -> tuple[float, float]:
    """Return the seconds between checkpoints, and the goodput."""
    assert prices.save is not None
    between = DAY / a_day
    interval = best_interval(prices.save, between)
    return interval, goodput(interval, save=prices.save, between=between, restart=prices.restart)
