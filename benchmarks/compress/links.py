"""Bandwidths in bits, as for networks: "100Mbit" is 12.5 million bytes per second."""

import argparse
import re

UNITS = {"Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
ALL = "10Mbit,30Mbit,100Mbit,300Mbit,1Gbit,2Gbit,5Gbit,10Gbit"
FEW = "10Mbit,100Mbit,1Gbit,10Gbit"


def bandwidths(text: str) -> list[float]:
    """Return bytes per second, rising: '10Mbit,1Gbit' -> [1.25e6, 1.25e8]."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]bit)", word.strip(), re.ASCII)
        if match is None or float(match[1]) == 0:
            raise argparse.ArgumentTypeError(f"{word!r} is no bandwidth; write 100Mbit or 1Gbit")
        found.append(float(match[1]) * UNITS[match[2]] / 8)
    return sorted(set(found))


def bandwidth_text(bandwidth: float) -> str:
    """Return a bandwidth as text: 1.25e7 -> "100 Mbit/s"."""
    bits = 8 * bandwidth
    unit = next((name for name in ("Gbit", "Mbit") if bits >= UNITS[name]), "Kbit")
    return f"{bits / UNITS[unit]:.3g} {unit}/s"
