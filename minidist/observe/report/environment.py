"""The section on the environment: the run's command, machine, versions, plan, model, options."""

from typing import Any

from minidist.observe.report.run_files import METRICS, RunFiles
from minidist.observe.report.section import PlainTable, Section


def section(run: RunFiles) -> Section:
    """Return the section with all that is needed to repeat the run."""
    found = Section("environment", "Environment and command")
    metrics = run.metrics
    if not metrics:
        found.missing.append(
            run.lacks(METRICS, "environment", "it is written when a run ends well")
        )
        return found
    machine = metrics.get("machine", {})
    if "command" in machine:
        found.code = machine["command"]
    else:
        found.missing.append(
            "No command: metrics.json of this run does not have it; runs of this version of "
            "minidist train do."
        )
    hosts = sorted({rank["host"] for rank in metrics.get("ranks") or [] if "host" in rank})
    about = {
        "date": machine.get("date"),
        "hosts": ", ".join(hosts),
        "processor": machine.get("processor"),
        "cores": machine.get("cores"),
        "system": machine.get("system"),
        "device": metrics.get("device"),
        "ranks": metrics.get("size"),
        "transport": metrics.get("transport"),
        "BLAS threads a rank": metrics.get("threads"),
        "weights, SHA-256": metrics.get("weights_sha256"),
        **{
            f"version of {name}": version
            for name, version in {
                **metrics.get("versions", {}),
                **machine.get("versions", {}),
            }.items()
        },
    }
    found.tables += [
        _pairs("Machine and versions", about),
        _pairs("Model", metrics.get("config", {})),
        _pairs("Plan", metrics.get("plan", {})),
        _pairs("Options of the command", _given(metrics)),
    ]
    return found


def _given(metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in metrics.get("options", {}).items()
        if value is not None and value is not False and name != "command"
    }


def _pairs(title: str, values: dict[str, Any]) -> PlainTable:
    return PlainTable(
        title,
        ["", ""],
        [[str(name), str(value)] for name, value in values.items() if value not in (None, "", [])],
    )
