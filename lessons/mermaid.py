"""Mermaid diagrams as lines of text, for a terminal: the kinds that the lessons' figures are drawn
in.

pie               a bar for each part
sequenceDiagram   a line for each message, `rank 0 → rank 1: c3 (0)`; a note becomes a heading
gantt             a row for each section, one character for each unit of time
graph             each arrow as `x → norm → f`, a subgraph's nodes indented below its title
"""

import re

NAMED = re.compile(r"(\w+)(?:\[\"|\(\(\")(.*?)(?:\"\]|\"\)\))")  # r0["rank 0<br/>tp=0"], s0(("+"))


def as_text(diagram: str) -> str:
    """Return a diagram as lines of text; unchanged if it is of another kind."""
    lines = [line.strip() for line in diagram.strip().splitlines()]
    kind = lines[0].split()[0] if lines else ""
    drawn = {"pie": _pie, "sequenceDiagram": _sequence, "gantt": _gantt, "graph": _graph}.get(kind)
    return "\n".join(drawn(lines)) if drawn else diagram


def _pie(lines: list[str]) -> list[str]:
    """Return each part's share as a bar: `"parameters" : 9` -> `parameters    9 % ███`."""
    parts = [
        (name, float(value))
        for line in lines[1:]
        for name, value in re.findall(r'"(.*)" *: *([\d.]+)', line)
    ]
    width = max(len(name) for name, _ in parts)
    total = sum(value for _, value in parts)
    return [
        lines[0].removeprefix("pie title").strip(),
        *(
            f"  {name:{width}} {100 * value / total:3.0f} % {'█' * round(40 * value / total)}".rstrip()
            for name, value in parts
        ),
    ]


def _sequence(lines: list[str]) -> list[str]:
    """Return messages in their order; an event within one rank has no arrow."""
    names = dict(re.findall(r"^participant (\w+) as (.+)$", "\n".join(lines), re.MULTILINE))
    told = []
    for line in lines[1:]:
        if note := re.match(r"Note over [^:]*: (.*)", line):
            told.append(note[1])
        elif message := re.match(r"(\w+)->>(\w+): (.*)", line):
            src, dst = (names.get(name, name) for name in message.group(1, 2))
            told.append(f"  {src}{f' → {dst}' * (src != dst)}: {message[3]}")
    return told


def _gantt(lines: list[str]) -> list[str]:
    """Return one row per section: each task from its start to its end, dots where nothing runs."""
    rows: dict[str, list[tuple[str, int, int]]] = {}
    title = next((line.removeprefix("title ") for line in lines if line.startswith("title ")), "")
    for line in lines:
        if line.startswith("section "):
            section = rows.setdefault(line.removeprefix("section "), [])
        elif task := re.match(r"(.+?) *: *(\d+), *(\d+)$", line):
            section.append((task[1], int(task[2]), int(task[3])))
    end = max(stop for tasks in rows.values() for _, _, stop in tasks)
    width = max(map(len, rows))
    return [title, *(f"  {name:{width}} {_row(tasks, end)}" for name, tasks in rows.items())]


def _row(tasks: list[tuple[str, int, int]], end: int) -> str:
    """Return a row such as `F1F2..B2B1`: the tasks' names, cut to their lengths, at their times."""
    row = ["."] * end
    for name, start, stop in tasks:
        row[start:stop] = f"{name:-<{stop - start}}"[: stop - start]
    return "".join(row)


def _graph(lines: list[str]) -> list[str]:
    """Return arrows and subgraphs in their order; a node by the first line of its text."""
    names = {
        name: text.replace("<br/>", " ") for line in lines for name, text in NAMED.findall(line)
    }
    told = []
    depth = 0
    for line in lines[1:]:
        if line == "end":
            depth -= 1
        elif line.startswith("subgraph "):
            depth += 1
            told.append("  " * depth + names[line.split()[1].split("[")[0]])
        elif "-->" in line:
            ends = re.split(r" *(<?)-->(?:\|\"(.*?)\"\|)? *", line)
            told.append(
                "  "
                + _arrows([names.get(name, name) for name in ends[::3]], ends[1::3], ends[2::3])
            )
        elif depth and (node := NAMED.match(line)):
            told.append("  " * (depth + 1) + names[node[1]])
    return told


def _arrows(nodes: list[str], back: list[str], words: list[str | None]) -> str:
    """Return a chain such as `x → f → g`, with `↔` where an arrow points both ways and its word
    after it. A long chain has one line per arrow."""
    steps = [
        f"{'↔' if both else '→'}{f' ({word})' if word else ''} {node}"
        for node, both, word in zip(nodes[1:], back, words, strict=True)
    ]
    return ("\n      " if sum(map(len, nodes)) > 60 else " ").join([nodes[0], *steps])
