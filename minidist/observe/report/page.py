"""The page: the sections as one HTML file, with styles, scripts and data inside.

All text of the run passes through html.escape, or is JSON in which `<`, `>` and `&` are escaped: a
model name like `<script>` is shown, not executed. Content-Security-Policy forbids every request.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from html import escape as html_escape
from importlib.resources import files
from typing import Any

from minidist.device.account import CATEGORIES
from minidist.errors import ConfigError
from minidist.observe.report import (
    diagnosis,
    environment,
    exposed,
    joules,
    links,
    losses,
    memory,
    ranks,
    stragglers,
    traffic,
)
from minidist.observe.report import steps as one_step
from minidist.observe.report.run_files import TRACE, RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section
from minidist.observe.step_log import loss_text
from minidist.reading import consistent, visible

PROGRAM = ("drawing.js", "timeline.js", "report.js")
LONG = 44
"""Number of letters above which the text of a cell may wrap."""


def sections_of(
    run: RunFiles,
    ledger: Sequence[PlainTable],
    ledger_lines: Sequence[str],
    account: Sequence[PlainTable],
) -> list[Section]:
    """Return all sections, in the order of the page.

    Args:    ledger, ledger_lines, account: traffic and memory compared with their formulas, as in
             the terminal.
    """
    recorded, steps = _recorded(run)
    findings = diagnosis.findings_of(run)
    culprits = {rank for found in findings or () for rank in found.ranks}
    return [
        _made("diagnosis", "What is wrong", lambda: diagnosis.section(run, findings, recorded)),
        _made("losses", "Losses and speed", lambda: losses.section(run)),
        _made("timeline", "Timeline of a step", lambda: one_step.section(run, recorded, steps)),
        _made(
            "overlap",
            "Overlap, and what exposed communication waits for",
            lambda: exposed.section(run, recorded, steps),
        ),
        _made("ranks", "Steps rank by rank", lambda: ranks.section(run, culprits)),
        _made("stragglers", "Slow ranks", lambda: stragglers.section(run)),
        _made("memory", "Memory by category", lambda: memory.section(run, steps, account)),
        _made("traffic", "Traffic from rank to rank", lambda: traffic.section(run)),
        _made(
            "ledger",
            "The ledger beside its formulas",
            lambda: traffic.ledger_section(run, ledger, ledger_lines),
        ),
        _made("links", "Links, measured while training", lambda: links.section(run)),
        _made("energy", "Energy", lambda: joules.section(run)),
        _made("environment", "Environment and command", lambda: environment.section(run)),
    ]


def _recorded(run: RunFiles) -> tuple[list[one_step.RecordedStep], list[one_step.RecordedStep]]:
    """Return the steps of the trace, and the steps that the page keeps."""
    try:
        with consistent(f"the spans of {TRACE}"):
            recorded = one_step.recorded_steps(run.timelines)
            return recorded, one_step.kept(recorded)
    except ConfigError as error:
        run.missing[TRACE] = str(error)
        run.timelines.clear()
        return [], []


def _made(key: str, title: str, make: Callable[[], Section]) -> Section:
    """Return a section; if its files are inconsistent, a section that says so."""
    try:
        with consistent("the numbers of the run folder"):
            section = make()
            for chart in section.charts:
                in_script(chart.data)
            _section(section)
            return section
    except ConfigError as error:
        return Section(
            key,
            title,
            missing=[f"No section on this: {error}; look into the files of the run folder."],
        )


def page(run: RunFiles, sections: Sequence[Section]) -> str:
    """Return the HTML of a report. Args: sections: result of sections_of."""
    charts = {chart.key: chart.data for section in sections for chart in section.charts} | {
        "categories": CATEGORIES
    }
    parts = {
        "title": escape(f"Report of {os.path.basename(os.path.realpath(run.folder))}"),
        "summary": _summary(run),
        "contents": "".join(
            f'<li><a href="#{section.key}">{escape(section.title)}</a></li>' for section in sections
        ),
        "sections": "".join(map(_section, sections)),
        "numbers": in_script(charts),
        "style": _file("report.css"),
        "program": "".join(map(_file, PROGRAM)),
        "library": _file("vendor/echarts.min.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def escape(text: str) -> str:
    """Return a text escaped for HTML; characters that UTF-8 cannot encode are made visible."""
    return html_escape(visible(text, keep="\n\t"))


def in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    packed = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return files("minidist.observe.report").joinpath(name).read_text(encoding="utf-8")


def _summary(run: RunFiles) -> str:
    """Return the HTML of the key numbers at the top."""
    metrics = run.metrics
    shown = dict[str, str]()
    if metrics:
        tokens = metrics["tokens_per_second"] * metrics["step_seconds"]
        rate = tokens / run.step_seconds if run.step_seconds else 0.0
        shown = {
            "steps": f"{len(metrics['losses']):,}",
            "ranks": str(metrics["size"]),
            "transport": str(metrics["transport"]),
            "parameters": f"{metrics['parameters']:,}",
            "validation loss": loss_text(metrics["validation_loss"]),
            "ms a step": f"{1e3 * run.step_seconds:,.1f}",
            "tokens a second": f"{rate:,.0f}",
        }
    elif run.steps:
        loss = run.steps[-1].get("loss")
        shown = {
            "steps so far": f"{run.steps[-1]['step']:,} of {run.steps[-1].get('steps', '?')}",
            "ranks": str(run.ranks),
            "loss": "not finite" if loss is None else f"{loss:.4f}",
        }
    boxes = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in shown.items()
    )
    state = (
        ""
        if metrics
        else (
            "<p class=missing>The run has not ended, or died: metrics.json is missing. "
            "minidist diagnose on the folder says more.</p>"
        )
    )
    return f"{state}<dl class=summary>{boxes}</dl>"


def _section(section: Section) -> str:
    body = "".join(f"<p class=missing>{escape(line)}</p>" for line in section.missing)
    body += "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    if section.code:
        body += f"<pre tabindex=0>{escape(section.code)}</pre>"
    body += "".join(map(_chart, section.charts)) + "".join(map(_table, section.tables))
    return (
        f'<section id="{section.key}" aria-labelledby="{section.key}-title"><h2 id="{section.key}-title">'
        f"{escape(section.title)}</h2>{body}</section>"
    )


def _chart(chart: Chart) -> str:
    return (
        f'<figure data-chart="{chart.key}"><div class=controls></div><div class=chart role=img '
        f'tabindex=0 aria-label="{escape(chart.label)}"></div><div class=beside></div></figure>'
    )


def _table(table: PlainTable) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [
            " class=number" if place in table.right else " class=long" if len(cell) > LONG else ""
            for place, cell in enumerate(cells)
        ]
        return (
            "<tr>"
            + "".join(
                f"<{tag}{kind}>{escape(cell)}</{tag}>"
                for kind, cell in zip(kinds, cells, strict=True)
            )
            + "</tr>"
        )

    head = f"<thead>{row(table.head, 'th')}</thead>" if any(table.head) else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    title = escape(table.title)
    return (
        f'<p class=title>{title}</p><div class=wide tabindex=0 role=region aria-label="{title}">'
        f'<table aria-label="{title}">{head}<tbody>{body}</tbody></table></div>'
    )
