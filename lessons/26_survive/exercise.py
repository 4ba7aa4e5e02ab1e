"""Exercise 26: a checkpoint that any number of ranks can read, and how often to write one.

Copy this file (`minidist lesson 26 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 26 DIR/exercise_26.py`. Three ranks write a vector; two, three and five
read it. What you may use:

    array.tofile(file), np.fromfile(file)  a file of float64 numbers, without dtype or shape
    group.all_gather(x)                    the rows of all ranks, in rank order; it returns when all
                                           have called it
    bounds(size, ranks)                    where the chunks begin and end: chunk r is
                                           [bounds[r], bounds[r + 1])
    os.replace(old, new)                   gives a file its name at once: a reader sees the old file
                                           there, or the new
"""

import hashlib
import json
import os  # noqa: F401 - you will want it

import numpy as np

from minidist.comm.chunks import bounds
from minidist.errors import CheckpointError
from minidist.grading import hole


def plain_save(group, chunk, size, folder):
    """Write a vector of `size` numbers; each rank has and writes its chunk; the manifest is written
    last."""
    file = folder / f"{group.rank}.bin"
    hole(1, "what does each rank write, and where?", file, chunk)
    digest = np.frombuffer(hashlib.sha256(file.read_bytes()).digest(), np.uint8)
    digests = hole(2, "every rank's digest; and when may the manifest be written?", group, digest)
    if group.rank == 0:
        (folder / "draft").write_text(
            json.dumps({"size": size, "sha256": [d.tobytes().hex() for d in digests]})
        )
        hole(3, "the draft becomes manifest.json. What if the machine stops meanwhile?", folder)


def plain_load(group, folder):
    """Return this rank's chunk of the vector; the group may have another size than the group that
    wrote it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    old, new = (bounds(manifest["size"], ranks) for ranks in (len(manifest["sha256"]), group.size))
    start = new[group.rank]
    stop = new[group.rank + 1]
    parts = []
    for rank, digest in enumerate(manifest["sha256"]):
        first, last = hole(
            4, "from where to where do shard `rank` and my chunk overlap?", start, stop, old, rank
        )
        if first < last:  # this shard has some of my numbers
            file = folder / f"{rank}.bin"
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise CheckpointError(f"{file}: is damaged")
            parts.append(
                hole(
                    5,
                    "the numbers [first, last) of the vector, out of this shard",
                    np.fromfile(file),
                    first,
                    last,
                    old[rank],
                )
            )
    return np.concatenate(parts)


def interval(save, between):
    """Return the seconds of work between two saves that minimize the time lost to saves and to
    interruptions.

    Args:    save: seconds of a save; between: mean seconds between two interruptions. See section
             5.
    """
    return hole(6, "where both cost the same", save, between)
