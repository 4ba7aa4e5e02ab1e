"""Clusters that several tests of this folder share."""

from collections.abc import Iterator

import pytest
from clusters import Cluster, hosts_up


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Two hosts without peculiarities."""
    with hosts_up("a", "b") as cluster:
        yield cluster
