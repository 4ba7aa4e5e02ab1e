"""Chapter 25 · --metrics-port: the newest step as Prometheus text, over HTTP on this host's
loopback.

    exporter = Exporter(9400)
    exporter.show(state)            # after a step: one assignment, so a scrape never delays a step
    exporter.close()                # the port is free again

    $ curl -s http://127.0.0.1:9400/metrics
    minidist_step 120.0
    minidist_sent_bytes_total{axis="dp",rank="0",verb="all_reduce"} 3.1e+08

prometheus_client serves each request on its own thread, and writes the text. The values are those
of rank 0; a Prometheus server adds them up over runs, and computes rates
(`rate(minidist_energy_joules_total[1m])` is watts).
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minidist.errors import ConfigError
from minidist.observe.step_log import StepState

LOOPBACK = "127.0.0.1"


class Exporter:
    """A metrics server of one run.

    Args:    port: of the loopback address.
    Raises:  ConfigError if the port cannot be opened.
    """

    def __init__(self, port: int) -> None:
        self._state: StepState | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=LOOPBACK, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: {error.strerror}; choose another port, or leave it out"
            ) from error

    def show(self, state: StepState) -> None:
        """Set the state that scrapes return from now on."""
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest step; before the first step only minidist_step, 0.
        prometheus_client calls it."""
        state = self._state
        yield GaugeMetricFamily(
            "minidist_step", "Steps made.", value=0 if state is None else state.step
        )
        if state is None:
            return
        yield GaugeMetricFamily("minidist_steps", "Steps of the whole run.", value=state.steps)
        yield GaugeMetricFamily(
            "minidist_loss", "Training loss of the newest step, nats a token.", value=state.loss
        )
        yield GaugeMetricFamily(
            "minidist_step_seconds", "Seconds of the newest step.", value=state.seconds
        )
        yield GaugeMetricFamily(
            "minidist_tokens_per_second",
            "Tokens a second of all ranks in the newest step.",
            value=state.tokens_per_second,
        )
        sent = CounterMetricFamily(
            "minidist_sent_bytes",
            "Payload bytes sent in training steps.",
            labels=["rank", "axis", "verb"],
        )
        for axis, verbs in state.sent_bytes.items():
            for verb, nbytes in verbs.items():
                sent.add_metric(["0", axis, verb], nbytes)
        yield sent
        memory = GaugeMetricFamily(
            "minidist_memory_bytes", "Bytes of live arrays.", labels=["rank", "category"]
        )
        for category, nbytes in state.memory.items():
            memory.add_metric(["0", category], nbytes)
        yield memory
        yield from self._energy(state)

    def _energy(self, state: StepState) -> Iterator[Metric]:
        """Yield the energy metric; an estimate is named as such in its text and source."""
        told = (
            "An estimate: the rank's busy seconds times watts."
            if state.energy_source == "estimate"
            else "Of the counters that the rank reads; they count all programs."
        )
        joules = CounterMetricFamily(
            "minidist_energy_joules",
            f"Joules since the first step. {told}",
            labels=["rank", "source"],
        )
        joules.add_metric(["0", state.energy_source], state.joules)
        yield joules

    def close(self) -> None:
        """Stop the server, without waiting for open requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
