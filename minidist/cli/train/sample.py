"""A sample of generated text: the beginnings of held-out lines, and the model's continuation."""

from minidist.data.text import Text
from minidist.nn import GPT

BEGUN = 32  # symbols of a line that the model is given
WRITTEN = 130  # symbols that the model adds
BEGUN_IDS = 8
WRITTEN_IDS = 32
MARK = "▸"  # stands between the two
TEMPERATURE = 0.6


def sample(model: GPT, text: Text, *, seed: int, count: int = 3) -> str:
    """Return `count` beginnings of held-out lines, each with MARK and the model's continuation."""
    pieces = []
    if not text.symbols:  # ids: some of the held-out ones, and what follows
        for i in range(count):
            first = len(text.validation) * (2 * i + 1) // (2 * count)
            begun = text.validation[first : first + BEGUN_IDS]
            ids = model.generate(begun, WRITTEN_IDS, temperature=TEMPERATURE, seed=seed + i)
            pieces.append(f"{text.decode(begun)} {MARK} {text.decode(ids[len(begun) :])}")
        return "\n\n".join(pieces)
    for i, line in enumerate(beginnings(text, count)):
        ids = model.generate(text.encode(line), WRITTEN, temperature=TEMPERATURE, seed=seed + i)
        pieces.append(line.strip("\n") + MARK + text.decode(ids[len(line) :]).rstrip())
    return "\n\n".join(pieces)


def beginnings(text: Text, count: int) -> list[str]:
    """Return beginnings of held-out lines of prose, spread over the text.

    Without prose, return the first symbols.
    """
    held_out = text.decode(text.validation)
    lines = [line[:BEGUN] for line in held_out.split("\n") if is_prose(line[:BEGUN])]
    if not lines:
        return [held_out[:BEGUN]]
    start = "\n" if "\n" in text.symbols else ""
    return [start + lines[len(lines) * (2 * i + 1) // (2 * count)] for i in range(count)]


def is_prose(beginning: str) -> bool:
    """Return whether the beginning of a line is BEGUN symbols long, starts with a letter, and is at
    least nine tenths letters and spaces."""
    letters = sum(symbol.isalpha() or symbol == " " for symbol in beginning)
    return len(beginning) == BEGUN and beginning.strip()[:1].isalpha() and letters >= 0.9 * BEGUN
