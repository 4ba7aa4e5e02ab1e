"""The ranks' side of `minidist bench compress`: one job whose link changes its speed on request.

open    begin a training of one way, with its warm-up if steps are only timed
steps   continue it for a number of steps, over a link of α and β
loss    return the loss on the validation text, or on some of its rows
"""

import time
from collections.abc import Callable
from typing import Any

from minidist.bench.compress.ways import way_of
from minidist.bench.jobs import answer, worker_arguments
from minidist.bench.step.ranks import Model
from minidist.comm.group import Group
from minidist.comm.transports.throttled import Delayed, delayed
from minidist.data import text
from minidist.device.backend import Array
from minidist.launch.membership import limit_blas_threads
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.recorder import Silent
from minidist.parallel.step.step import Batch

MODULE = "minidist.bench.compress.ranks"
SEED = 0


class Moments(Silent):
    """A recorder of the moments when buckets are passed to their scheme: time.perf_counter()
    seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def announce(self, axis: str, name: str) -> None:
        self.seconds.append(time.perf_counter())


class Training:
    """A training over a link whose speed changes. Every rank of the group makes one, and all make
    the same calls.

    Args:    group: over throttled links; model: its batch is per rank; steps: of the whole
             training.
             lr: the peak of a cosine schedule; source: of the text; rows: number of validation
             rows, evenly spread, for a loss during training.
    """

    def __init__(
        self,
        group: Group,
        model: Model,
        *,
        steps: int,
        lr: float,
        source: str = "python",
        rows: int = 240,
    ) -> None:
        assert isinstance(group.transport, Delayed)
        self.group = group
        self.link = group.transport
        self.model = model
        self.steps = steps
        self.lr = lr
        self.text = text.load(source)
        inputs, targets = text.windows(self.text.validation, context=model.context)
        self.validation = {
            whole: self._rows(inputs, targets, 1 if whole else max(1, len(inputs) // rows))
            for whole in (False, True)
        }
        self.moments = Moments()
        self.trainer: Trainer | None = None

    def answer(self, what: str, **options: Any) -> Any:
        """Answer a question of the main process."""
        does: dict[str, Callable[..., Any]] = {
            "open": self.open,
            "steps": self.run,
            "loss": self.loss,
        }
        return does[what](**options)

    def open(self, way: str, timed: bool = False) -> dict[str, Any]:
        """Begin a training of this way; with `timed` after its warm-up. Returns: the number of
        parameters."""
        self.close()
        self._set_link(0.0, 0.0)
        chosen = way_of(way, self.steps)
        chosen = chosen.timed() if timed else chosen
        self.trainer = Trainer(
            chosen.plan(self.group.size),
            self.model.config(),
            self.group,
            seed=SEED,
            lr=chosen.rate * self.lr,
            lr_schedule="cosine",
            warmup=self.steps // 20,
            steps=self.steps,
            recorder=self.moments,
        )
        if timed:
            self._go(max(2, chosen.period))
        return {"parameters": sum(p.size for p in self.trainer.model.parameters())}

    def run(self, steps: int, alpha: float = 0.0, beta: float = 0.0) -> dict[str, Any]:
        """Make steps over a link of α and β. Returns: seconds of each step, bytes and messages
        sent, moments and sizes of buckets."""
        self._set_link(alpha, beta)
        before = self._sent()
        messages = self._messages()
        self.moments.seconds.clear()
        begun = time.perf_counter()
        seconds = self._go(steps)
        assert self.trainer is not None
        scheme = (
            self.trainer.strategy.data_axis.scheme
            if self.trainer.plan.local_steps is None
            else None
        )
        return {
            "seconds": seconds,
            "nbytes": self._sent() - before,
            "messages": self._messages() - messages,
            "moments": [moment - begun for moment in self.moments.seconds],
            "sizes": [] if scheme is None else [run.size for run in scheme.runs],
        }

    def loss(self, whole: bool = False) -> float:
        """Return the mean loss per token on some rows of the validation text, or on all; over a
        link of no time."""
        assert self.trainer is not None
        self._set_link(0.0, 0.0)
        return self.trainer.evaluate([self.validation[whole]])

    def close(self) -> None:
        """End the training."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def _rows(self, inputs: Array, targets: Array, stride: int) -> Batch:
        """Return every `stride`-th row; their number is a multiple of the ranks."""
        inputs = inputs[::stride]
        targets = targets[::stride]
        count = len(inputs) // self.group.size * self.group.size
        return inputs[:count], targets[:count]

    def _go(self, steps: int) -> list[float]:
        assert self.trainer is not None
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.trainer.step(
                text.batch(
                    self.text.train,
                    self.trainer.steps_done,
                    batch=self.model.batch * self.group.size,
                    context=self.model.context,
                    seed=SEED,
                )
            )
            seconds.append(time.perf_counter() - begun)
        return seconds

    def _set_link(self, alpha: float, beta: float) -> None:
        """Set the link's speed; barriers make sure that no message of the old speed is in
        flight."""
        self.group.barrier()
        self.link.alpha = alpha
        self.link.beta = beta
        self.group.barrier()

    def _sent(self) -> int:
        return _of_step(self.group.ledger.sent_bytes("step"))

    def _messages(self) -> int:
        return _of_step(self.group.ledger.messages("step"))


def _of_step(counts: dict[str, dict[str, int]]) -> int:
    """Return the sum over all axes and verbs, without scalars (axis control)."""
    return sum(sum(verbs.values()) for axis, verbs in counts.items() if axis != "control")


def add_options(parser: Any) -> None:
    """Add the options of the training to a rank's parser."""
    for name, kind in (("steps", int), ("lr", float), ("data", str), ("transport", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    Model.add_options(parser)


def main() -> None:
    """Run as one rank."""
    import minidist as md

    parser = worker_arguments()
    add_options(parser)
    options = parser.parse_args()
    limit_blas_threads(1, local_size=1)
    world = md.init(transport=options.transport, threads=1)
    with delayed(world, alpha=0.0, beta=0.0) as group:
        training = Training(
            group, Model.of(options), steps=options.steps, lr=options.lr, source=options.data
        )
        answer(options.meet, world.rank, training.answer)
        training.close()


if __name__ == "__main__":
    main()
