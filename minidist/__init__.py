"""Distributed training from scratch, one readable module per chapter.

    import minidist as md

    world = md.init()                                  # this rank's md.Group; without a job: size 1
    results = md.run(fn, size=4, transport="threads")  # results of fn(world), in rank order
    mesh = md.Mesh(world, dp=2, tp=2)                  # ranks on a grid: mesh["dp"] is a Group
    plan = md.Plan(dp=2, tp=2)                         # the axes that cut a job, its divided state
    trainer = md.Trainer(plan, config, world)          # config: a minidist.nn.GPTConfig
    loss = trainer.step(batch)                         # global batch in, global mean loss out

    # a step of a plan on a cluster that you do not have
    found = md.simulate(plan, config, "h100:128x8", batch=1024)
    # the plans that fit on that cluster, the best first
    ranking = md.plan_for(config, "h100:128x8", batch=1024)

    # a model and a loop of your own: modules of md.nn, functions of md.ops on md.Tensor
    ddp = md.DDP(model, world)                         # also md.Zero1, md.Zero2, md.Zero3
    loss = ddp.step(batch, md.optim.AdamW(ddp.parameters, lr=1e-3))
    md.Pipeline                                        # stages over ranks, with a schedule

    md.errors                                          # every exception, in one tree

`dir(minidist)` lists these names. All except `errors` load on first use: `import minidist` loads
neither NumPy nor MPI.
"""

import _signal
import sys

_AS_MODULE = sys.argv[0] == "-m" and any(
    option[:1] == "-" and option[-1:] == "m" and name.partition(".")[0] == "minidist"
    for option, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
)
if _AS_MODULE and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # the current folder: a random.py there is not Python's own
_OURS = (
    _AS_MODULE
    or sys.argv[0].endswith("/minidist")
    or sys.modules["__main__"].__name__ == "minidist"
)
if _OURS and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # of our command, until its main() takes it: Ctrl-C may come in the next import, that of
    # `signal` too (_signal is in C)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if sys.platform == "win32":
    _LINE = (
        "minidist runs on Linux and macOS; on Windows use WSL, which is Linux: `wsl --install`, "
        "then install minidist inside it"
    )
    _COMMANDS = ("-m", "minidist", "minidist.exe", "minidist-script.py")
    raise (
        SystemExit(_LINE)
        if sys.argv[0].replace("\\", "/").rpartition("/")[2] in _COMMANDS
        else ImportError(_LINE)
    )

from minidist import errors  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from minidist import nn, optim
    from minidist.autograd import ops
    from minidist.autograd.tensor import Tensor
    from minidist.comm.group import Group
    from minidist.launch import init, run
    from minidist.parallel.data.ddp import DDP
    from minidist.parallel.hybrid.hybrid import Trainer
    from minidist.parallel.hybrid.mesh import Mesh
    from minidist.parallel.hybrid.plan import Plan
    from minidist.parallel.pipeline.pipeline import Pipeline
    from minidist.parallel.zero.zero1 import Zero1
    from minidist.parallel.zero.zero2 import Zero2
    from minidist.parallel.zero.zero3 import Zero3

    plan_for: Callable[..., Any]  # these two stand above this room
    simulate: Callable[..., Any]

__version__ = "1.0.0"
__all__ = [
    "DDP",
    "Group",
    "Mesh",
    "Pipeline",
    "Plan",
    "Tensor",
    "Trainer",
    "Zero1",
    "Zero2",
    "Zero3",
    "errors",
    "init",
    "nn",
    "ops",
    "optim",
    "plan_for",
    "run",
    "simulate",
]

_HOMES = {
    "Group": "minidist.comm.group",
    "init": "minidist.launch",
    "run": "minidist.launch",
    "Mesh": "minidist.parallel.hybrid.mesh",
    "Plan": "minidist.parallel.hybrid.plan",
    "Trainer": "minidist.parallel.hybrid.hybrid",
    "DDP": "minidist.parallel.data.ddp",
    "Zero1": "minidist.parallel.zero.zero1",
    "Zero2": "minidist.parallel.zero.zero2",
    "Zero3": "minidist.parallel.zero.zero3",
    "Pipeline": "minidist.parallel.pipeline.pipeline",
    "Tensor": "minidist.autograd.tensor",
    "plan_for": "minidist.plan.ranking",
    "simulate": "minidist.simulate.simulate",
}
_MODULES = {"nn": "minidist.nn", "ops": "minidist.autograd.ops", "optim": "minidist.optim"}


def __getattr__(name: str) -> Any:
    """Load a public name from its home (PEP 562). Raises: AttributeError for any other name."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(
        f"module 'minidist' has no attribute {name!r}; it offers {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    """Return only the public names."""
    return [*__all__, "__version__"]
