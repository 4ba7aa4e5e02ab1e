"""--metrics-port: Prometheus text that its own parser reads, on the loopback alone, and never in a
step's way."""

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minidist.errors import ConfigError
from minidist.observe.exporter import Exporter
from minidist.observe.step_log import StepState

STATE = StepState(
    step=3,
    steps=9,
    loss=2.5,
    seconds=0.125,
    tokens_per_second=2048.0,
    sent_bytes={"dp": {"all_reduce": 123}, "control": {"all_reduce": 8, "gather": 16}},
    memory={"parameters": 4096, "total": 5000},
    joules=1.25,
    energy_source="rapl",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served() -> Iterator[tuple[Exporter, int]]:
    port = free_port()
    exporter = Exporter(port)
    yield exporter, port
    exporter.close()


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """{(name, label values by name of label): value}."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_its_own_parser_reads_the_text(served: tuple[Exporter, int]) -> None:
    exporter, port = served
    assert samples(scrape(port)) == {("minidist_step",): 0}
    exporter.show(STATE)
    assert samples(scrape(port)) == {
        ("minidist_step",): 3,
        ("minidist_steps",): 9,
        ("minidist_loss",): 2.5,
        ("minidist_step_seconds",): 0.125,
        ("minidist_tokens_per_second",): 2048,
        ("minidist_sent_bytes_total", "dp", "0", "all_reduce"): 123,
        ("minidist_sent_bytes_total", "control", "0", "all_reduce"): 8,
        ("minidist_sent_bytes_total", "control", "0", "gather"): 16,
        ("minidist_memory_bytes", "parameters", "0"): 4096,
        ("minidist_memory_bytes", "total", "0"): 5000,
        ("minidist_energy_joules_total", "0", "rapl"): 1.25,
    }


def test_an_estimate_is_called_one(served: tuple[Exporter, int]) -> None:
    exporter, port = served
    exporter.show(STATE)
    assert "estimate" not in scrape(port)
    exporter.show(replace(STATE, energy_source="estimate"))
    text = scrape(port)
    assert "# HELP minidist_energy_joules_total Joules since the first step. An estimate: " in text
    assert 'source="estimate"' in text


def test_a_port_that_is_taken_is_one_line(served: tuple[Exporter, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        Exporter(served[1])
    assert str(caught.value) == (
        f"--metrics-port {served[1]}: Address already in use; choose another port, or leave it out"
    )


def test_it_listens_on_the_loopback_alone(served: tuple[Exporter, int]) -> None:
    assert served[0]._server.server_address[0] == "127.0.0.1"


def test_clients_that_hang_hold_up_nothing() -> None:
    """Neither a step, nor another scrape, nor the end; then the port is free."""
    port = free_port()
    exporter = Exporter(port)
    hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    hanging[0].sendall(b"GET /metrics")
    start = time.thread_time()
    for step in range(1000):
        exporter.show(replace(STATE, step=step))
    assert time.thread_time() - start < 0.5
    assert samples(scrape(port))["minidist_step",] == 999
    exporter.close()
    for client in hanging:
        client.close()
    Exporter(port).close()
