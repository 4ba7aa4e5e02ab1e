"""What benchmarks/gpu.sh knows and tells: the machine, what is missing on it, a section's figures,
the table.

It needs nothing but Python, so that it also runs where CuPy or packages of minidist are missing.
"""

import argparse
import importlib
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "numpy",
    "ml_dtypes",
    "msgpack",
    "psutil",
    "rich",
    "threadpoolctl",
    "safetensors",
    "matplotlib",
    "mpi4py",
    "pytest",
    "pytest_timeout",
    "xdist",
    "hypothesis",
)
"""Modules that a section or minidist asks for, beside CuPy and PyTorch."""

TOOLS = ("g++", "compute-sanitizer", "mpirun")
SEVERAL_RANKS = 23000  # NCCL 2.30: several ranks on one GPU
CARRY = "unzip their wheels into one folder and give it with --site"


# ------------------------------------------------------------------------------------------ machine


def machine() -> dict[str, Any]:
    """Device, driver and versions; None for what is not there."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": None,
        "driver": _driver(),
        "cuda": None,
        "nccl": None,
        "cupy": _version("cupy", "cupy-cuda13x", "cupy-cuda12x"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "why": "",
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cupy = importlib.import_module("cupy")
            found["cupy"] = cupy.__version__
            if not cupy.is_available():
                return {**found, "why": "CuPy finds no GPU or driver that it can use"}
            runtime = cupy.cuda.runtime
            nccl = importlib.import_module("cupy.cuda.nccl")
            about = runtime.getDeviceProperties(0)
            found.update(
                device=about["name"].decode(),
                devices=runtime.getDeviceCount(),
                compute=f"{about['major']}.{about['minor']}",
                cuda=runtime.runtimeGetVersion(),
                nccl=nccl.get_version() if nccl.available else None,
            )
    except Exception as error:  # of any library that this machine lacks: it is what the report says
        found["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return (told.stdout.splitlines() or [""])[0].strip() or None


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def missing(needs: list[str], found: dict[str, Any]) -> list[str]:
    """Those modules and tools (tool:NAME) that this machine lacks. "cupy" asks for a GPU that it
    can use."""
    lacking = []
    for need in needs:
        if need == "cupy":
            lacking += [] if found["device"] else [f"a GPU with CuPy ({found['why']})"]
        elif need == "cupy.cuda.nccl":
            lacking += [] if found["nccl"] else ["NCCL"]
        elif need.startswith("tool:"):
            lacking += [] if shutil.which(need[5:]) else [need[5:]]
        elif importlib.util.find_spec(need) is None:
            lacking.append(need)
    return lacking


def shown(found: dict[str, Any]) -> str:
    """The machine, a line each, and one line that says what is missing."""
    rows = [
        (name, found.get(name))
        for name in ("device", "driver", "cuda", "nccl", "cupy", "torch", "python", "date")
    ]
    lacking = missing(list(PACKAGES), found) + ([] if found["torch"] else ["torch"])
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    said = [
        f"packages missing: {', '.join(lacking)}; {CARRY}" if lacking else "packages: all are here",
        f"tools missing: {', '.join(absent)}" if absent else "tools: all are here",
    ]
    why = [f"no GPU: {found['why']}"] if found["why"] else []
    return "\n".join(
        [*(f"{name:7} {'none' if value is None else value}" for name, value in rows), *why, *said]
    )


# ------------------------------------------------------------------------------------------ figures


def figures(folder: Path) -> list[str]:
    """A section's key figures, a line each, from its JSON and XML files and its log."""
    lines = [line for path in sorted(folder.glob("*.xml")) for line in _tests(path)]
    for path in sorted(folder.glob("*.json")):
        if path.name != "result.json":
            lines += _measured(path.stem, json.loads(path.read_text(encoding="utf-8")))
    log = folder / "log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    told = re.findall(
        r"^(?:=+ )?(.*(?:(?:ERROR|RACECHECK) SUMMARY|ranks: \w+ right|^NCCL ).*)$",
        text,
        re.MULTILINE,
    )
    return lines + [line.strip() for line in told]


def _tests(path: Path) -> Iterator[str]:
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        count = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        bad = count["failures"] + count["errors"]
        yield (
            f"{path.stem}: {count['tests'] - bad - count['skipped']} passed, {bad} failed, "
            f"{count['skipped']} skipped"
        )


def _measured(name: str, result: Any) -> Iterator[str]:
    """Lines about one JSON of `minidist bench step`, `bench kernels` or `train`."""
    what = result.get("what") if isinstance(result, dict) else None
    if what == "step":
        for row in result["rows"]:
            yield (
                f"{row['name']}: {1e3 * row['step_seconds']:.2f} ms, "
                f"{row['tokens_per_second']:,.0f} tokens/s, {row['utilisation']:.0%} of the "
                f"products' rate, {row['of_floor']:.0%} of the floor"
            )
    elif what == "kernels":
        judged = [row for row in result["rows"] if row["verdict"]]
        met = sum(row["verdict"] == "met" for row in judged)
        wrong = [
            f"{row['kernel']} {row['contender']}"
            for row in result["rows"]
            if row["seconds"] is None
        ]
        yield f"{met} of {len(judged)} kernels meet their aim" + (
            f"; no time: {', '.join(wrong)}" if wrong else ""
        )
    elif isinstance(result, dict) and "losses" in result:
        yield f"{name}: loss {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}"
    if what in ("step", "kernels"):
        yield from (f"left out: {line}" for line in result["left_out"])


def record(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write result.json of a section; put date, device, versions and commands into its other JSON
    files."""
    folder = Path(args.out, args.section)
    run = {
        **found,
        "section": args.section,
        "rehearsal": args.rehearsal,
        "commands": _commands(args),
    }
    for path in folder.glob("*.json"):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # a command that was stopped while it wrote
            path.unlink()
            continue
        text = json.dumps({**held, "run": run}, indent=1, ensure_ascii=False).replace(
            args.out, "$OUT"
        )
        path.write_text(text + "\n", encoding="utf-8")  # no path of this machine
    result = {**run, "state": args.state, "seconds": args.seconds, "figures": figures(folder)}
    (folder / "result.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _commands(args: argparse.Namespace) -> list[str]:
    """As they are typed in the repository's folder: no path of this machine."""
    said = args.commands.replace("{root}/", "").replace("{here}", f"$OUT/{args.section}")
    return [line.strip() for line in said.splitlines() if line.strip()]


# -------------------------------------------------------------------------------------------- table


def table(out: Path, rehearsal: bool) -> int:
    """Write table.json and table.md from every section's result, and print them. Returns 1 if a
    section failed."""
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/result.json"))
    ]
    results.sort(key=lambda result: result["date"])
    (out / "table.json").write_text(
        json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    lines = (
        ["A rehearsal over stand-ins: nothing here was measured on a GPU.", ""] if rehearsal else []
    )
    machines = dict.fromkeys(
        f"{result['device']}, driver {result['driver']}, CUDA {result['cuda']}, NCCL "
        f"{result['nccl']}, CuPy {result['cupy']}, PyTorch {result['torch']}, Python "
        f"{result['python']}, {result['date'][:10]}"
        for result in results
    )
    lines += [
        *machines,
        "",
        "| section | state | seconds | key figures |",
        "| --- | --- | --- | --- |",
    ]
    for result in results:
        told = "<br>".join(line.replace("|", "/") for line in result["figures"])
        lines.append(f"| {result['section']} | {result['state']} | {result['seconds']} | {told} |")
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in lines[: lines.index("")] if not rehearsal else [lines[0], *machines]:
        print(line)
    wide = max((len(result["section"]) for result in results), default=0)
    for result in results:
        print(f"{result['section']:{wide}}  {result['seconds']:>4} s  {result['state']}")
        print("".join(f"{'':{wide}}          {line}\n" for line in result["figures"]), end="")
    print(f"written: {out / 'table.md'}, table.json, results.tar.gz")
    return int(
        any(
            result["state"] != "done" and not result["state"].startswith("cannot")
            for result in results
        )
    )


def main() -> int:
    """One of gpu.sh's questions. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["machine", "missing", "head", "nccl", "section", "table"])
    for name in ("json", "machine", "out", "section", "about", "commands", "needs", "state"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--rehearsal", action="store_true")
    args = parser.parse_args()
    found = (
        json.loads(Path(args.machine).read_text(encoding="utf-8")) if args.machine else machine()
    )
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if args.what == "machine":
        print(shown(found))
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    elif args.what == "missing":
        lacking = missing(args.needs.split(), found)
        print(f"missing: {', '.join(lacking)}; packages: {CARRY}" if lacking else "")
    elif args.what == "head":
        rehearsed = ["a rehearsal over stand-ins, not a measurement"] if args.rehearsal else []
        print(
            "\n".join([f"{args.section}: {args.about}", *rehearsed, shown(found), *_commands(args)])
        )
    elif args.what == "nccl":
        several = (found["nccl"] or 0) >= SEVERAL_RANKS
        print(
            f"NCCL {found['nccl']}: "
            + (
                "several ranks share a GPU"
                if several
                else "one rank a GPU; several ranks on one need 2.30 and take CUDA IPC here"
            )
        )
        return int(not several)
    elif args.what == "section":
        record(args, found)
    else:
        return table(Path(args.out), args.rehearsal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
