"""Chapter 24 · What a number of tokens takes: days, joules, money; own machines, cloud, and spot with interruptions.

    found = forecast(choice, ranking, tokens=300e9, interruptions_a_day=6)
    found.days, found.own.dollars, found.cloud.dollars, found.spot.dollars, found.spot.days

A spot machine costs a part of the price and may be taken away. The job saves every √(2 δ M) seconds
(survive/interval.py): a save of δ seconds, an interruption every M on average; goodput is what is left of the time.

notes: N2 §12.4.
"""

from dataclasses import asdict, dataclass
from typing import Any

from minidist.plan.ranking import Choice, Ranking
from minidist.survive.interval import best_interval, goodput

DAY, HOUR, KWH = 86400.0, 3600.0, 3.6e6


@dataclass(frozen=True)
class Prices:
    """What machines cost. The defaults are round numbers to start from, not offers of anybody: give your own.

    Attributes: spot       part of the cloud's price
                own        part of the cloud's price for a machine of one's own, written off in `years` at full use
                kwh        dollars a kilowatt-hour, of own machines
                save       seconds in which training stands still for a checkpoint; restart: until work goes on
                failures   interruptions a day of a thousand devices that are not spot (Llama team 2024, section 3.3.4:
                           419 in 54 days on 16,384 GPUs)
    """

    spot: float = 0.4
    own: float = 0.35
    kwh: float = 0.10
    save: float = 30.0
    restart: float = 300.0
    failures: float = 419 / 54 / 16.384


@dataclass(frozen=True)
class Offer:
    """One way to get the machines. Attributes: interval: seconds between checkpoints; goodput: part of the time that is
    kept work; dollars: None where no source states the price.
    """

    name: str
    days: float
    dollars: float | None
    goodput: float
    interval: float


@dataclass(frozen=True)
class TokenForecast:
    """Attributes: days: without interruptions; joules: None where no source states the watts."""

    tokens: float
    steps: float
    days: float
    joules: float | None
    own: Offer
    cloud: Offer
    spot: Offer

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def forecast(choice: Choice, ranking: Ranking, *, tokens: float, interruptions_a_day: float = 4.0,
             prices: Prices | None = None) -> TokenForecast:
    """Args:    tokens: of the whole run; interruptions_a_day: of the spot job as a whole.
    Raises:  ConfigError for rates that are not above 0.
    """
    prices = prices or Prices()
    size = choice.plan.size
    spent = choice.confirmed.step_seconds if choice.confirmed else choice.step_seconds
    steps = tokens / (ranking.batch * ranking.config.context)
    days = steps * spent / DAY
    price, failures = ranking.cluster.device.price_an_hour, prices.failures * size / 1000
    joules = None if choice.joules is None else choice.joules * steps

    def offer(name: str, part: float, a_day: float, power: float = 0.0) -> Offer:
        interval, kept = _kept(a_day, prices)
        taken = days / kept if kept else float("inf")
        money = None if price is None else size * price * part * taken * DAY / HOUR + power
        return Offer(name, taken, money, kept, interval)

    power = 0.0 if joules is None else joules / KWH * prices.kwh
    return TokenForecast(tokens, steps, days, joules, offer("own", prices.own, failures, power),
                         offer("cloud", 1.0, failures), offer("spot", prices.spot, interruptions_a_day + failures))


def _kept(a_day: float, prices: Prices) -> tuple[float, float]:
    """Seconds between checkpoints, and goodput."""
    between = DAY / a_day
    interval = best_interval(prices.save, between)
    return interval, goodput(interval, save=prices.save, between=between, restart=prices.restart)
