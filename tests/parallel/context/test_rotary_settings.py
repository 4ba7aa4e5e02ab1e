"""ε of the norms, and base and scaling of rotary positions: ranks that divide heads and tokens
compute with the model's, as one process does."""

from typing import Any

import pytest
from planted import Bug, check_caught
from split import GROUPED, Rank, check_parity, train

from minidist.autograd import ops
from minidist.nn import LayerNorm, RMSNorm, RopeScaling
from minidist.optim import SGD
from minidist.parallel.context.token_shard import TokenShardAttention

SETTINGS: dict[str, Any] = {
    "norm_eps": 0.01,
    "rope_theta": 500.0,
    "rope_scaling": RopeScaling(8.0, 0.02, 0.5, 12),
}


def ring(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` with tp=2, and a ring of the other ranks."""
    return train(world, {"tp": 2, "cp": world.size // 2}, changes, **options)


def all_to_all(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` with tp=2, and all-to-all attention between the other ranks."""
    plan = {"tp": 2, "cp": world.size // 2, "attention": "all-to-all"}
    return train(world, plan, changes, **options)


JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ring": (ring, {"context": 13}),
    "all-to-all": (all_to_all, {"context": 13}),
    "pattern": (ring, {"context": 140, "attention_pattern": "local:64"}),
}


def check(job: str, norm: str = "rms") -> None:
    """tp=2,cp=2 equals one process."""
    kind, changes = JOBS[job]
    changes = {**GROUPED, **SETTINGS, **changes, "norm": norm}
    check_parity(kind, 4, changes, optimizer=SGD, clip=None, sequences=2)


@pytest.mark.parametrize("job", JOBS)
def test_tensor_and_context_parallel_equal_one_process(job: str) -> None:
    check(job)


def without(name: str) -> Any:
    """Return a `rotate` that leaves one setting of the model out."""

    def rotate(right: Any, self: Any, x: Any, positions: Any) -> Any:
        settings = {"base": self.rope_theta, "scaling": self.rope_scaling}
        del settings[name]
        return ops.rotary(x, positions, **settings)

    return rotate


BUGS = [
    *(
        Bug(f"{name} ignored, {job}", TokenShardAttention, "rotate", without(name), {"job": job})
        for name in ("base", "scaling")
        for job in JOBS
    ),
    # only ranks have fewer tokens than the sequence
    *(
        Bug(
            f"ε ignored on cut sequences, {norm}",
            owner,
            "forward",
            lambda right, self, x, of=owner: right(plain(self, of, x), x),
            {"job": "ring", "norm": norm},
        )
        for norm, owner in (("rms", RMSNorm), ("layer", LayerNorm))
    ),
]


def plain(norm: Any, kind: Any, x: Any) -> Any:
    """Return the norm, with the default ε where x has fewer tokens than the sequence."""
    if x.shape[1] == JOBS["ring"][1]["context"]:
        return norm
    other = object.__new__(kind)
    vars(other).update({**vars(norm), "eps": 1e-5})
    return other


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, check, monkeypatch)
