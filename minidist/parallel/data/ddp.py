"""Chapter 07 · DDP: every rank holds the whole model and works on its part of the batch.

The idea. All ranks start from the same weights. Each takes its part of the batch forward and
backward; the gradients are summed over the ranks, and every rank then makes the same step from the
same sum. So the replicas stay equal, and equal to one process that had seen the whole batch.
Reducing is hidden behind backward: gradients are sent in buckets, and the sum of a bucket starts as
soon as its last gradient is final, while backward still works on the layers below.

    compute         forward | backward: layer 4 | layer 3 | layer 2 | layer 1 | wait | optimizer
    communication                               | bucket 0 | bucket 1 | bucket 2 |

What each rank holds, Ψ parameters in float32 with Adam on P ranks:

                 one process     each rank of P
    batch        B sequences     B/P sequences, cut in array_split order
    parameters   4Ψ bytes        4Ψ      the whole model
    gradients    4Ψ              4Ψ      in buckets: own part's, then the sum over all, in place
    optimizer    8Ψ              8Ψ      the same on each rank
    activations  A               A/P

Cost, per step and rank, ring all-reduce, for any number of backward passes (their gradients are
added up before they are sent):

    bytes        2(P-1)/P × 4Ψ   (over the ranks together exactly 2(P-1) × 4Ψ): 4Ψ at P = 2, towards
                                 8Ψ for many
    messages     2(P-1) × buckets; a bucket above 4 MiB goes round in parts of at most 4 MiB, and
                 2(P-1) is for each part (a parameter larger than `bucket_bytes` is a bucket of its
                 own: collectives/ring.py)
    control      one float64, the loss, and with a Trainer two digests of its batch; no norm is sent

The notes' steps (N0, "DDP: Distributed Data Parallel"), as they happen here:

    DDP 1  the model is on every device. No rank copies it: each draws the same weights from the
           same seed, and a digest is compared once to be sure.
    DDP 2  each device works on its part of the data.
    DDP 3  gradients are *summed* over the devices during backward: each rank's loss is its sum of
           token losses over the token count of the *whole* batch, so the sum is the gradient of the
           mean, also when parts differ in size.
    DDP 4  no controller; a ring carries the sums over every link at once.

A GPT uses every parameter in every step, about in the order in which buckets are cut, so a Plan
offers neither `unused` nor `static`. A model with branches sets them in its own loop: `DDP(model,
group, loss=loss, static=True)`.

notes:   N0 DDP, 数据并行 工作流程; N1 DDP; N3 §3.1
Source:  Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from collections.abc import Iterable, Sequence

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.data.buckets import BUCKET_BYTES, BucketOrder, make_buckets
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.replicas import check_equal_replicas, sharers
from minidist.parallel.step.scheme import GradientRun, Scheme
from minidist.parallel.step.step import Batch, Counted, Loss, part_of, zero_unused
from minidist.parallel.step.strategy import Collective, DataAxis


def plain_ddp(model: GPT, optimizer: Optimizer, group: Group, batches: Iterable[Batch]) -> None:
    """Train by DDP without buckets and without overlap; batches are global, the numbers are those
    of N0:403."""
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)  # 2 my part of the data
        loss = model.loss(part.inputs, part.targets, divisor=targets.size)  # 3 forward
        loss.backward()  # 4 backward: my gradients
        for p in model.parameters():  # 5 synchronise: all ranks' sum
            group.all_reduce(p.grad, out=p.grad, algorithm="ring")
        optimizer.step()  # 6 update: the same on all ranks
        optimizer.zero_grad()


# `DDP` below adds buckets, because an all-reduce of a bias costs as many messages as one of 4 MiB;
# and overlap: a bucket's all-reduce starts when its last gradient is final, while backward computes
# the next bucket. So buckets fill in the order in which backward completes gradients; all ranks
# must agree on this order.
# It also takes frozen and unused parameters, ranks without rows, and several passes (chapter 08).
# One step; the numbers are those of plain_ddp:
#   begin_step     forgets the gradients; no message
#   part_of     2  this rank's rows
#   forward     3  of a pass's rows; no message
#   backward    4  autograd adds each gradient into its bucket (Parameter.accumulate), and calls the
#                  parameter's hook when it is final: BucketOrder._final, _start_complete
#                  (data/buckets.py). In the step's last backward they call _start_reduce for each
#                  complete bucket; it gives the bucket to the scheme (step/scheme.py), which starts
#                  an all-reduce on the group that _attach named. The group's worker thread carries it
#                  out while backward computes (CallWorker, comm/calls/async_call.py), by default
#                  around a ring (comm/collectives/ring.py)
#               5  wait for the sums, which lie in the buckets: a parameter's grad is a view of one
#   finish_step    nothing; in a pipeline (chapter 17) a last backward, of nothing: the sums
#   conclude       all-gathers the loss
#   update      6  the optimizer's step, of the same sums on each rank; no message


class DDP(DataAxis):
    """A replica of a model, kept equal to the others of its group. Its step is PassLoop.start_step
    (step/strategy.py).

        ddp = DDP(model, world)      # any Module with loss(inputs, targets, divisor) -> Tensor
        optimizer = AdamW(ddp.parameters, lr=1e-3)
        loss = ddp.step((inputs, targets), optimizer)    # the global batch, equal on every rank

    Args:    model: equal on all ranks; its gradients move into buckets. Frozen weights stay as they
             are.
             group: the ranks that share the batch: rank r computes rows r of numpy.array_split.
             loss: loss(part, divisor) -> Tensor of one number, the sum of the losses of the part's
             targets over `divisor`; part.inputs and part.targets are this rank's rows, divisor is
             the number of targets of the global batch (default: `model.loss`).
             bucket_bytes: largest size of a bucket, in bytes.
             algorithm: of the gradients' all-reduce; pinned, so that the same run gives the same
             bits.
             unused: the meaning of a parameter on which a rank's loss does not depend: "zero", a
             gradient of zero, because another rank may use it; "error": a mistake (a layer
             forgotten in forward), named with the rank.
             static: True if the loss uses the same parameters in every step. Then buckets are made
             anew after the first step, in the order in which gradients were completed, and without
             parameters that no rank uses.
             precision: of weights and update (default: one dtype for all); recorder: gets the spans
             of work.
             scheme: the form in which gradients are sent (default: as they are; chapter 21); not
             with `static`.
    Attributes: parameters: the arguments for the optimizer.
    Raises:  MismatchError if the replicas do not start equal.
    """

    divides_state = False

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        loss: Loss | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "ring",
        unused: str = "zero",
        static: bool = False,
        precision: Precision | None = None,
        recorder: Recorder | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__(
            model, group, loss=loss, algorithm=algorithm, precision=precision, recorder=recorder
        )
        if scheme is not None and static:
            raise ConfigError(
                "DDP: static=True makes buckets anew after the first step, and a scheme keeps "
                "state for each; leave one of the two out"
            )
        self.weights = trainable(model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.counted = Counted(self.weights)
        self.bucket_bytes, self.buckets = bucket_bytes, make_buckets(self.weights, bucket_bytes)
        # all-reduces in progress: of buckets 0, 1, …, without a gap
        self._pending: list[Pending] = []
        check_equal_replicas(model.parameters(), group, when="before the first step")  # DDP 1
        self._bucket_order = BucketOrder(
            [bucket.parameters for bucket in self.buckets],
            self._start_reduce,
            unused=unused,
            who=f"DDP rank {group.rank} of {group.size}",
            by="DDP.backward",
        )
        self._to_record = static
        # static: the first step's order, until buckets follow it
        self._recorded: list[Parameter] | None = None
        self._left_out: list[Parameter] = []  # static: in no bucket, because no rank uses them
        self.scheme: Scheme = scheme or Scheme(algorithm)
        self._attach()

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add gradients into the buckets; the `last` backward sums them over the ranks (DDP 3, DDP
        4): the same bits on each.

        Args:    as DataAxis.backward.
        Cost:    one all-reduce per bucket, started during the last backward; returns when all have
                 ended.
        Raises:  GradientError if the last step's gradients are still there, or as `unused` and
                 `static` say.
        """
        if self._recorded is not None:
            self._follow(self._recorded)
        with self.recorder.span("backward", notes="DDP 3"):
            deferred = self._bucket_order.backward(
                self.precision, share, dy, defer=defer, reduces=last
            )
        if last:
            with self.recorder.span("wait for gradients", notes="DDP 4"):
                for pending in self._pending:
                    pending.wait()
            self._pending = []
            self._summed = True
            zero_unused(self._left_out)
            if self._to_record:
                self._recorded = self._bucket_order.completed
                self._to_record = False
        return deferred

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Add the gradients that a backward has deferred into the buckets."""
        self._bucket_order.backward_weights(self.precision, deferred)

    def _start_reduce(self, index: int) -> None:
        """Start the sum of a bucket whose last gradient is final; the sums before it have started
        (buckets.py says why)."""
        self.recorder.announce(self.scheme.runs[index].group.axis, f"all_reduce bucket {index}")
        self._pending.append(self.scheme.start_all_reduce(index, self.buckets[index].data))

    def _attach(self) -> None:
        self.scheme.attach(
            [
                GradientRun.whole(
                    bucket.parameters, sharers(bucket.parameters, self.group), "all_reduce"
                )
                for bucket in self.buckets
            ]
        )

    def _follow(self, completed: list[Parameter]) -> None:
        """Put gradients into buckets in the order in which the first step completed them
        (`static`).

        Cost:    once, 8 bytes per parameter and rank under `control`; the old buckets are freed
                 before the new ones are made.
        """
        self._recorded = None
        order = _agreed(self.group, self.weights, completed)
        for parameter in self.weights:
            parameter.bind_gradient(None)
        self.buckets = []
        self.buckets = make_buckets(reversed(order), self.bucket_bytes)
        self._bucket_order.arrange([bucket.parameters for bucket in self.buckets])
        self._attach()
        reached = set(order)
        self._left_out = [parameter for parameter in self.weights if parameter not in reached]

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare weights and, in mixed precision, masters, as Strategy.check_replicas."""
        check_equal_replicas((*self.model.parameters(), *self.parameters), group, when=when)

    def traffic(self, passes: int) -> list[Collective]:
        """Return one all-reduce per bucket, for any number of passes."""
        return [
            Collective(
                run.verb, run.size * run.dtype.itemsize, run.group, sent=self.scheme.sent_bytes(run)
            )
            for run in self.scheme.runs
        ]


def _agreed(
    group: Group, parameters: Sequence[Parameter], completed: Sequence[Parameter]
) -> list[Parameter]:
    """Return one order for all ranks: that of the first rank that completed any, then the
    parameters that only others completed, rank by rank.

    Args:    parameters: the same on all ranks; completed: those that this rank's backward reached,
             in its order.
    Cost:    one all-gather of 8 bytes per parameter and rank, under `control`.
    """
    place = {parameter: number for number, parameter in enumerate(completed)}
    mine = np.array([place.get(parameter, -1) for parameter in parameters], np.int64)
    with group.ledger.control():
        rows = group.all_gather(mine).reshape(group.size, -1)
    order = [
        int(index) for row in rows for index in np.argsort(row, kind="stable") if row[index] >= 0
    ]
    return [parameters[index] for index in dict.fromkeys(order)]
