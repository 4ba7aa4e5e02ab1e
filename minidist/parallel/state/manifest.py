"""The manifest of a checkpoint: a list of what the files hold. It is written last, so a folder with
a manifest is complete.

    RUN/step-000300/
        shard-00000.safetensors     written by rank 0
        shard-00001.safetensors     written by rank 1
        manifest.json               {"format", "about": {…}, "shards": [{file, nbytes, header,
                                    arrays}, …], "digest"}

The digest is of the bytes before it. So a reader computes it from the file as it is, and writes no
JSON of its own to compare. For eight ranks with local steps that takes 3 ms; formats 1 and 2 take
22 ms.
"""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType, structs

from minidist.errors import CheckpointError, ConfigError
from minidist.files import DRAFTS, create, read_regular
from minidist.reading import (
    MOST_BYTES,
    Count,
    Finite,
    Positive,
    Seconds,
    Whole,
    decoded,
    require,
    require_shallow,
)

MANIFEST = "manifest.json"
FORMAT = 3
READABLE = (1, 2, 3)  # in 1 a history is a list; in 1 and 2 the digest is of the content
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_DIGEST = b',\n"digest": '
_STEP = re.compile(r"step-([0-9]{6,18})(~?)")  # with ~: moved aside for a new one of the same step


# ------------------------------------------------------------------------------------------- schema

Name = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f\ud800-\udfff]+\Z")]
Numbers = Annotated[int, Meta(ge=1, le=2**40)]


class _ArrayTold(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The schema of an Entry of shard_file.py."""

    key: Name
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    shape: list[Count]
    # of a permuted tensor a step may be below 0
    stripes: list[tuple[Count, Numbers, Whole, Numbers]]
    offset: Count
    nbytes: Count
    checksums: list[Count]


class _ShardTold(msgspec.Struct, gc=False):
    file: Annotated[str, Meta(pattern=r"^shard-[0-9]{5,9}\.safetensors\Z")]
    nbytes: Count
    header: tuple[Count, Count]
    arrays: list[_ArrayTold]


class _PlanTold(msgspec.Struct):
    dp: Numbers
    pp: Numbers
    ep: Numbers
    cp: Numbers
    tp: Numbers
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    precision: str = "fp32"
    compress: str = "none"


_PLAN_LEFT_OUT = {
    field.name: field.default for field in structs.fields(_PlanTold) if not field.required
}
"""The fields of a plan that a manifest may leave out, with the values that they have then."""


class _PrecisionTold(msgspec.Struct):
    skipped: Count
    loss_scale: tuple[Positive, Count] | None = None
    float8: dict[str, Annotated[list[list[Finite]], Meta(min_length=3, max_length=3)]] = {}


class _CountersTold(msgspec.Struct):
    steps: Count
    scale: Positive


class _SchemeTold(msgspec.Struct):
    name: str
    counters: _CountersTold
    owed: dict[str, dict[str, Annotated[int, Meta(ge=0, le=2**16)]]]
    layout: dict[str, str]


class _StateTold(msgspec.Struct, rename={"local_steps": "local steps"}):
    updates: dict[str, Count]
    precision: _PrecisionTold
    scheme: _SchemeTold | UnsetType = UNSET
    local_steps: Count | UnsetType = UNSET


class _AboutTold(msgspec.Struct):
    """The schema of the fields that Trainer.save writes; another program may write fewer, or
    more."""

    steps_done: Count | UnsetType = UNSET
    ranks: Numbers | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=-(2**63))] | UnsetType = UNSET
    optimizer: Name | UnsetType = UNSET
    config: dict[str, Any] | UnsetType = UNSET
    plan: _PlanTold | UnsetType = UNSET
    state: _StateTold | UnsetType = UNSET


History = dict[Literal["<f8", "<i4"], str] | list[float]


class _IntervalTold(msgspec.Struct):
    standstill_seconds: list[Seconds]
    step_seconds: Seconds
    since: Seconds
    work_seconds: Seconds
    saving_seconds: Seconds
    interruptions: Count


class _MetricsTold(msgspec.Struct):
    losses: History
    step_seconds: Seconds | None = None
    generations: History = []
    interval: _IntervalTold | None = None


class _DataTold(msgspec.Struct):
    source: str
    sha256: str


class _RunTold(msgspec.Struct):
    """The schema of the fields that minidist train adds."""

    options: dict[str, None | bool | Whole | Finite | str]
    metrics: _MetricsTold
    data: _DataTold
    vocabulary: str  # the symbols; "" where the run learned ids


class _ManifestTold(msgspec.Struct):
    format: Any
    digest: str
    about: _AboutTold
    shards: list[_ShardTold]


# ----------------------------------------------------------------------------------- files of a run


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank:05}.safetensors"


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / f"step-{step:06}"


def step_of(folder: Path) -> int | None:
    """Return the step whose checkpoint a folder is, by its name; None for another folder."""
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def write_manifest(folder: Path, about: dict[str, Any], shards: list[dict[str, Any]]) -> None:
    """Write the manifest, and return when it and the folder are on the disk. Raises: OSError."""
    lines = [
        f'"{key}": {json.dumps(value)}'
        for key, value in (("format", FORMAT), ("about", about), ("shards", shards))
    ]
    with open(create(folder / MANIFEST, mode=0o666), "wb") as stream:
        stream.write(_with_digest(("{" + ",\n".join(lines)).encode()))
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises: CheckpointError if there is none, or it is not
    what was written."""
    file = folder / MANIFEST
    try:
        data = read_regular(file, most=MOST_BYTES, member=True)
        content = decoded(data)
        kind = content["format"]
        digest = content.pop("digest")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no complete checkpoint is here: it has no {MANIFEST}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: is damaged or no manifest of a checkpoint; take an older one"
        ) from error
    if kind not in READABLE:
        raise CheckpointError(
            f"{file}: has format {kind!r}, this minidist reads {READABLE[0]} to {READABLE[-1]}; "
            "use the one that wrote it"
        )
    whole = _with_digest(data.rpartition(_DIGEST)[0]) if kind > 2 else _older(content)
    if data != whole:  # also where a flipped bit says the same: 1e-5 and 1E-5
        raise CheckpointError(f"{file}: is damaged: its digest differs; take an older checkpoint")
    try:
        require({**content, "digest": digest}, _ManifestTold)
        require_shallow(content["about"])
        if scheme := content["about"].get("state", {}).get("scheme"):
            require(scheme["counters"], dict[str, Finite])
        for shard in content["shards"]:
            _require_arrays(shard)
    except ConfigError as error:
        raise CheckpointError(
            f"{file}: is no manifest of a checkpoint: {error}; take an older one"
        ) from error
    if "plan" in content["about"]:
        content["about"]["plan"] = _PLAN_LEFT_OUT | content["about"]["plan"]
    return content  # type: ignore[no-any-return]


def _require_arrays(shard: dict[str, Any]) -> None:
    """Raise ConfigError unless each array has the numbers that its stripes name, and the file is
    long enough for all."""
    held = shard["header"][0] + sum(array["nbytes"] for array in shard["arrays"])
    if held > shard["nbytes"]:
        raise ConfigError(
            f"{shard['file']} should have {shard['nbytes']:,} bytes, but its arrays have {held:,}"
        )
    for array in shard["arrays"]:
        size = math.prod(array["shape"])
        count = 0
        for start, length, step, times in array["stripes"]:
            count += length * times
            end = start + step * (times - 1)
            if end < 0 or start + length > size or end + length > size:
                raise ConfigError(
                    f"{array['key']} of shape {array['shape']} has no numbers "
                    f"{[start, length, step, times]}"
                )
        if count * ITEMSIZE[array["dtype"]] != array["nbytes"]:
            raise ConfigError(
                f"{array['key']} has {array['nbytes']:,} bytes for {count:,} numbers of "
                f"{array['dtype']}"
            )
        if array["offset"] + array["nbytes"] > shard["nbytes"]:
            raise ConfigError(
                f"{array['key']} ends after the {shard['nbytes']:,} bytes of {shard['file']}"
            )


def require_told(folder: Path, about: dict[str, Any], *names: str) -> None:
    """Raise CheckpointError unless a manifest has these fields, which a Trainer always writes."""
    if lacking := [name for name in names if name not in about]:
        raise CheckpointError(
            f"{folder}: its manifest has no {lacking[0]}; another program than a Trainer wrote it"
        )


def require_run(folder: Path, about: dict[str, Any]) -> None:
    """Raise CheckpointError unless a manifest has the fields that minidist train needs to continue,
    with the right types."""
    try:
        require(about, _RunTold)
        for name in ("losses", "generations"):
            unpacked(about["metrics"].get(name, []))
    except ConfigError as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: is not of minidist train: {error}; take an older one"
        ) from error


def packed(history: Sequence[float], dtype: str) -> dict[str, str]:
    """Return a history of one number per step, for a manifest: {dtype: base64 of its bytes}.

    For 25,000 losses a manifest takes 4 ms; a list in JSON takes 45 ms.
    """
    return {dtype: base64.b64encode(np.asarray(history, dtype).tobytes()).decode()}


def unpacked(history: "dict[str, str] | list[Any]") -> list[Any]:
    """Return the numbers of `packed`; a list, as in format 1, is returned as it is. Raises:
    CheckpointError."""
    if isinstance(history, list):
        return [*history]
    try:
        ((dtype, text),) = history.items()
        numbers = np.frombuffer(base64.b64decode(text), dtype)
    except ValueError as error:
        raise CheckpointError(
            "a history of the run is damaged; take an older checkpoint"
        ) from error
    return numbers.tolist()  # type: ignore[no-any-return]


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run that have a manifest, the oldest step first."""
    found = {}
    # "step-1" comes after "step-1~"
    for folder in sorted(run.iterdir(), reverse=True) if run.is_dir() else []:
        step = step_of(folder)
        if step is not None and (folder / MANIFEST).is_file():
            found[step] = folder
    return [found[step] for step in sorted(found)]


def publish(draft: Path, place: Path) -> None:
    """Move a complete draft to its place at once; then remove a checkpoint that was there, which
    stays if the move fails."""
    aside = place.with_name(place.name + "~")
    replaces = place.exists()
    if replaces:
        remove(aside)
        place.rename(aside)
    try:
        draft.rename(place)
    except OSError:
        if replaces:
            aside.rename(place)
        raise
    sync_folder(place.parent)
    for old in place.parent.glob("*~"):  # of this step, and of one whose save was killed just here
        if (old / MANIFEST).is_file() and (old.with_name(old.name[:-1]) / MANIFEST).is_file():
            remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there; a reader sees all of it or none."""
    if folder.exists():
        # swept up later, if this is cut short
        grave = Path(tempfile.mkdtemp(prefix=DRAFTS, dir=folder.parent))
        folder.rename(grave / folder.name)
        shutil.rmtree(grave, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_digest(data: bytes) -> bytes:
    """Return the bytes of the file: `data`, followed by the digest."""
    return data + _DIGEST + f'"{hashlib.sha256(data).hexdigest()}"}}\n'.encode()


def _older(content: dict[str, Any]) -> bytes:
    """Return the bytes of a file of formats 1 and 2, with a digest of the content."""
    digest = hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    return json.dumps(content | {"digest": digest}, indent=1).encode()
