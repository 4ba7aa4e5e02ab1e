"""One rank of PyTorch's DDP or FSDP over gloo, for test_torch.py: trains from our weights, writes
its losses.

python torch_job.py PEER RANK SIZE FOLDER        # reads FOLDER/job.npz, writes
                                                 FOLDER/losses-RANK.npy
"""

import sys
from pathlib import Path

import numpy as np
import torch

from minidist.bench.step.peers import torch_step
from minidist.nn import GPTConfig


def main() -> None:
    peer = sys.argv[1]
    rank = int(sys.argv[2])
    size = int(sys.argv[3])
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    with np.load(folder / "job.npz") as job:
        arrays = {name: job[name] for name in job.files}
    inputs, targets = (torch.from_numpy(arrays.pop(name)) for name in ("inputs", "targets"))
    vocabulary, context, layers, width, heads = map(int, arrays.pop("sizes"))
    config = GPTConfig(
        vocabulary=vocabulary, context=context, layers=layers, width=width, heads=heads
    )
    # FSDP1 takes norms in float32 and refuses float64
    clip = None if peer.startswith("FSDP1") else 0.5
    step = torch_step(config, ranks=size, clip=clip, peer=peer, weights=arrays)
    rows = inputs.shape[1] // size
    mine = slice(rank * rows, (rank + 1) * rows)
    np.save(
        folder / f"losses-{rank}.npy",
        [step(ids[mine], wanted[mine]) for ids, wanted in zip(inputs, targets, strict=True)],
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
