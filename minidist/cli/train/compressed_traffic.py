"""Traffic of a plan that compresses gradients: bytes by each rank, the formula, and the saving."""

from typing import Any

from rich.table import Column, Table

from minidist.console import exactly

Metrics = dict[str, Any]


def sent_by(rank: dict[str, Any], kind: str, axes: Any = None) -> int:
    """Return bytes or messages of a rank in all steps, without scalars.

    `axes`: only along these.
    """
    return sum(
        count
        for axis, verbs in rank[kind].items()
        for count in verbs.values()
        if axis != "control" and (axes is None or axis.split(".")[0] in axes)
    )


def saving(metrics: Metrics) -> str:
    """Return a line: the bytes of gradients and weights per step, with and without the scheme."""
    plain = metrics["formula"]["plain"]
    steps = metrics["steps"]
    scheme = metrics["plan"]["compress"]
    sent = sum(sent_by(rank, "sent_bytes", plain) for rank in metrics["ranks"]) / steps
    whole = sum(plain.values()) / steps
    less = f"{whole / sent:.1f} times fewer" if 0 < sent < whole else "none saved"
    return (
        f"{scheme}: {exactly(sent)} bytes a step along {' and '.join(plain)} instead of "
        f"{exactly(whole)}: {less}"
    )


def traffic_table(metrics: Metrics) -> Table:
    """Return a table of each rank's bytes and messages per step, with the formula for the sum,
    unless the bytes depend on the data."""
    steps = metrics["steps"]
    total = metrics["formula"]["sent_bytes"]
    table = Table(
        *(Column(name, justify="right") for name in ("rank", "bytes", "by formula", "messages")),
        header_style="bold",
    )
    sent, messages = (
        [sent_by(rank, kind) for rank in metrics["ranks"]] for kind in ("sent_bytes", "messages")
    )
    for rank, (nbytes, count) in enumerate(zip(sent, messages, strict=True)):
        table.add_row(
            str(rank),
            exactly(nbytes / steps),
            "",
            exactly(count / steps),
            end_section=rank == len(sent) - 1,
        )
    table.add_row(
        "all",
        exactly(sum(sent) / steps),
        "" if total is None else exactly(total / steps),
        exactly(sum(messages) / steps),
    )
    return table
