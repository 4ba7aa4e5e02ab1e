"""Chapter 17 · Composing strategies: a Plan cuts the job, a Mesh holds the groups, a Trainer runs
the steps.

    world = md.init()
    trainer = md.Trainer(md.Plan(dp=world.size), GPTConfig(...), world, optimizer="adamw", lr=1e-3,
    seed=0)
    loss = trainer.step(batch)                  # the global batch in, the global mean loss out

Every rank passes the same global batch and gets the same loss; the plan says which part of the
batch, of the model and of the state a rank works on. With only the data axis (dp) the step is that
of data/ddp.py, or with zero=1, 2 or 3 of zero1.py, zero2.py or zero3.py, with strategy= of
parameter_server.py, or with local_steps= of chapter 21. A single rank takes the step of single.py,
or drives several devices (data_parallel.py). With any other axis, a pipeline (pp), experts (ep),
context (cp) or tensor parallelism (tp), the step is composed of the steps of the axes:
hybrid_step.py, where this chapter continues. With any of them blocks may be checkpointed
(activations.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from minidist.autograd.tensor import no_grad
from minidist.comm.group import Group
from minidist.comm.records import check_alike, named, share_records
from minidist.data.rank_batch import BatchMeeting, check_batch, with_digests
from minidist.device.account import MemoryAccount
from minidist.device.account import current as current_account
from minidist.device.allocator import tune_allocator
from minidist.errors import CheckpointError, ConfigError, ShapeError
from minidist.nn import DropoutKey, GPTConfig
from minidist.optim import LR_SCHEDULES, SGD, Adam, AdamW, LearningRate, Optimizer, RMSProp
from minidist.parallel.experts.expert_load import ExpertLoad
from minidist.parallel.hybrid.makers import make_budget, make_keeper, make_model, make_store
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.option_checks import check_clip
from minidist.parallel.hybrid.parallelize import parallelize
from minidist.parallel.hybrid.plan import AXES, Plan
from minidist.parallel.memory.activations import checkpoint_blocks
from minidist.parallel.memory.offload_costs import require_room
from minidist.parallel.state import checkpoint
from minidist.parallel.state.manifest import require_told
from minidist.parallel.state.save_async import AsyncSaver, PendingSave
from minidist.parallel.state.state_exchange import restore, take_snapshot
from minidist.parallel.state.state_map import require_together, set_weights
from minidist.parallel.step.flat import untrained
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.step.step import Batch, Part, micro_parts, part_of
from minidist.parallel.step.strategy import Strategy

__all__ = ["AXES", "OPTIMIZERS", "LR_SCHEDULES", "Mesh", "Plan", "Trainer"]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "rmsprop": RMSProp,
    "sgd": SGD,
}


class Trainer:
    """The training of a GPT under a plan. All ranks of `world` make one Trainer, with equal
    arguments, which are compared.

    Args:    plan: how the job is cut; its size must be the size of world, the Group of all ranks.
             config: the model; its dtype is the master weights', and must be float32 for another
             precision than fp32.
             seed: of the weights and of dropout.
             optimizer: one of OPTIMIZERS; lr: its peak learning rate; optimizer_options: its
             further options.
             lr_schedule: one of LR_SCHEDULES (optim/schedules.py), with its `warmup`, the number of
             `steps`, and lr_options, the further numbers of a LearningRate.
             clip: bound of the gradients' global norm, or None; device: "cpu" or "cuda".
             recorder: gets the spans of work (an observe.Timeline, for example); offload_dir: for
             the files of offload=all. These two may differ between ranks.
    Attributes: model, optimizer, mesh, plan, precision; world: the mesh's; account: this rank's
                memory.
                learning_rate: of an update, by its number from 0; a skipped step is no update.
                steps_done, updates_done; steps_before: the steps of steps_done that were in the
                loaded checkpoint.
                strategy: runs the steps; store: the place of ZeRO's chunks.
                loads: the load of the experts, if there are some.
    Raises:  PlanError, ConfigError, DeviceError for what cannot work; MismatchError on every rank
             if an argument differs on one, or if replicas do not start equal.
    """

    def __init__(
        self,
        plan: Plan,
        config: GPTConfig,
        world: Group,
        *,
        seed: int = 0,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        optimizer_options: dict[str, Any] | None = None,
        lr_schedule: str = "constant",
        warmup: int = 0,
        steps: int | None = None,
        lr_options: dict[str, Any] | None = None,
        clip: float | None = 1.0,
        device: str = "cpu",
        recorder: Recorder | None = None,
        offload_dir: str | Path | None = None,
    ) -> None:
        """Build mesh, model, strategy and optimizer. Args, Raises: as in help(minidist.Trainer)."""
        check_alike(
            world,
            {
                **named("plan", plan.as_dict()),
                **named("config", asdict(config)),
                **named("optimizer option", optimizer_options or {}),
                **named("lr option", lr_options or {}),
                "seed": seed,
                "optimizer": optimizer,
                "lr": lr,
                "lr_schedule": lr_schedule,
                "warmup": warmup,
                "steps": steps,
                "clip": clip,
                "device": device,
            },
        )
        plan.require(world.size, config)
        plan.require_model(config)
        if optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer {optimizer!r}; choose one of {', '.join(OPTIMIZERS)}"
            )
        check_clip(plan, clip)
        tune_allocator()
        self.config = config
        self._launched = world
        self.recorder = recorder or Silent()
        self.account: MemoryAccount = current_account()
        self.seed = seed
        self.steps_done = 0
        self.steps_before = 0
        self._clip = clip
        self._schedule = LearningRate(
            name=lr_schedule, peak=lr, warmup=warmup, total=steps, **(lr_options or {})
        )
        self._device = device
        self._offload_dir = offload_dir
        self._make_optimizer = partial(OPTIMIZERS[optimizer], lr=lr, **(optimizer_options or {}))
        self._build(plan)

    def _build(self, plan: Plan) -> None:
        """Make mesh, model, strategy and optimizer of a plan, in their state before the first
        step."""
        self.plan = plan
        self.mesh = Mesh(self._launched, plan.order, plan.placement, **plan.axes)
        self.world = self.mesh.world
        self._survivors: Group | None = None
        self._saver: AsyncSaver | None = None
        self.precision, self.model = make_model(plan, self.config, self.mesh)
        self.store = make_store(
            plan, self._offload_dir, device=self._device, recorder=self.recorder
        )
        self.keeper = make_keeper(plan, self.mesh, self.store, recorder=self.recorder)
        checkpoint_blocks(self.model, plan.checkpoint_blocks, self.keeper)
        self.account.limit = plan.device_memory
        self.account.instead = plan.savings
        try:
            self.strategy: Strategy = parallelize(
                self.model,
                self.mesh,
                plan,
                seed=self.seed,
                key=self._key,
                device=self._device,
                precision=self.precision,
                recorder=self.recorder,
                store=self.store,
            )
            self._meeting = BatchMeeting(self.world, self.strategy)
            # with nodes, if the ranks' count
            self.config = replace(self.config, mixture=self.model.config.mixture)
            self.loads = ExpertLoad(self.model, self.mesh.copies)
            noise = self.config.mixture is not None and self.config.mixture.noise
            self._draws = bool(self.config.dropout or noise or "8bit" in plan.ways)
            self.budget = make_budget(
                plan, self.model, self.mesh, self.keeper, self.strategy.pipeline
            )
            self.optimizer: Optimizer = self._make_optimizer(self.strategy.parameters)
            if self.strategy.data_axis.scheme is not None:
                self.strategy.data_axis.scheme.take_optimizer(self.optimizer)
        except BaseException:
            self.store.close()
            self.account.limit = None
            raise

    def require_room(self, sequences: int) -> None:
        """Check that a step fits (dp, without experts). Args: sequences: of the batch. Raises:
        MemoryLimitError."""
        require_room(self.plan, self.model, self.account, sequences)

    def _key(self, part: Part) -> DropoutKey | None:
        """Return the dropout key of some rows, by step and global token, so that the split does not
        change it; None without dropout."""
        if not self._draws:
            return None
        return DropoutKey.of_sequences(self.seed, self.steps_done, part.first, *part.inputs.shape)

    @property
    def lr(self) -> float:
        """The peak learning rate, the optimizer's. A new one counts from the next step on."""
        return self.optimizer.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.optimizer.lr = lr

    @property
    def learning_rate(self) -> LearningRate:
        """The rate of an update, by its number from 0; its peak is the optimizer's rate."""
        if self._schedule.peak != self.optimizer.lr:
            self._schedule = replace(self._schedule, peak=self.optimizer.lr)
        return self._schedule

    @learning_rate.setter
    def learning_rate(self, schedule: LearningRate) -> None:
        self._schedule = schedule
        self.optimizer.lr = schedule.peak

    @property
    def clip(self) -> float | None:
        """Bound of the gradients' global norm, or None. A new one counts from the next step on."""
        return self._clip

    @clip.setter
    def clip(self, clip: float | None) -> None:
        check_clip(self.plan, clip)
        self._clip = clip

    @property
    def updates_done(self) -> int:
        """The number of steps whose update was made: all, except steps of float16 that
        overflowed."""
        return self.steps_done - self.precision.skipped

    @property
    def steps_here(self) -> int:
        """The number of steps that this job has made, without those of a checkpoint; its ledger and
        its account count these."""
        return self.steps_done - self.steps_before

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean token loss over global batches, the same on every rank. No gradients;
        dropout off.

        Args:    batches: one or more global batches, as step's, equal on all ranks. Raises: as
                 step.
        Returns: the mean of all tokens' losses.
        Cost:    as many passes as a step; under `control` one all-gather of two float64 per rank,
                 and one of 8 bytes per rank that compares the batches.
        """
        everyone = self.survivors()
        group, readers = self.strategy.readers(everyone)
        total = 0.0
        tokens = 0
        digests: list[float] = []
        with (
            self.model.evaluating(),
            no_grad(),
            self.strategy.evaluating(),
            self.recorder.span("evaluate"),
        ):
            for batch in batches:
                check_batch("evaluate", batch, self.config.context)
                digests += with_digests(batch, len(digests)).digests
                part = part_of(batch, size=readers, rank=group.rank)
                total += sum(map(self.strategy.loss_share, micro_parts(part, self.plan.accumulate)))
                tokens += part.targets.size
        if not digests:
            raise ShapeError("evaluate: there is no batch; pass at least one")
        digest = crc32(repr(digests).encode())
        check_alike(everyone, {"digest of the batches to evaluate": digest})
        total, count = self.strategy.sum_shares(total, tokens, group)
        return total / count

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all master weights, whole, on the host. Every rank calls it: ZeRO
        gathers them.

        Returns: {dotted path: array}, in the masters' dtype. Raises: CommError, MemoryLimitError if
        they do not fit.
        """
        return self.strategy.state_dict()

    def save(self, folder: str | Path, **about: Any) -> None:
        """Write a checkpoint (parallel/state/checkpoint.py), which a Trainer of any plan can load. Every
        rank calls it.

        Args:    folder: the checkpoint; one of this name is replaced at the end.
                 about: further words for its manifest, as JSON; rank 0's count.
        Raises:  CheckpointError on every rank if one cannot write; then nothing is left. CommError
                 as all verbs.
        """
        if self._saver is not None:
            self._saver.wait()
        checkpoint.save(
            Path(folder), self.strategy, self.optimizer, self.world, self._described(about)
        )

    def start_save(self, folder: str | Path, **about: Any) -> PendingSave:
        """Start a save that is written during the next steps (parallel/state/save_async.py); return
        when the state is copied.

        It waits for a save in progress. If a save fails, rank 0 prints the error, and training
        continues.

        Args:    as save. Raises: MemoryLimitError if the copies do not fit; CommError as all verbs
                 (Group).
        Returns: its wait() returns when the checkpoint is complete, or raises what save would;
                 close() waits for it, too.
        """
        if self._saver is None:
            self._saver = AsyncSaver(
                self.strategy, self.optimizer, self.world, memory=self.store.host
            )
        return self._saver.start(Path(folder), self._described(about))

    def _described(self, about: dict[str, Any]) -> dict[str, Any]:
        rate = {"learning_rate": asdict(self.learning_rate)}
        return (
            rate
            | about
            | {
                "steps_done": self.steps_done,
                "seed": self.seed,
                "config": asdict(self.config),
                "optimizer": type(self.optimizer).__name__,
                "plan": self.plan.as_dict(),
            }
        )

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model and optimizer under any plan; the seed is
        the checkpoint's.

        Args:    folder: the checkpoint, the same on every rank.
        Returns: its `about`.
        Raises:  CheckpointError on every rank if one finds it damaged, or it is of another model or
                 optimizer; CommError as all verbs (Group). Then the state of this training is of no
                 use.
        """
        about = checkpoint.load(Path(folder), self.strategy, self.optimizer, self.world)
        require_told(Path(folder), about, "steps_done", "seed")
        self.steps_done = self.steps_before = about["steps_done"]
        self.seed = about["seed"]
        return about

    def set_weights(self, read: Callable[[str], np.ndarray]) -> None:
        """Begin with these weights in place of drawn ones. Every rank calls it, before the first
        step.

        Args:    read: read(name) -> the whole weight of that dotted path, as state_dict() names
                 them, in the shape and dtype of the masters. Each rank asks for those of which it
                 has a part.
        Raises:  CheckpointError for asynchronous servers and for local steps; MismatchError if
                 ranks read different weights.
        """
        require_together(self.strategy)
        if self.strategy.common_state_of is not None:
            raise CheckpointError("set_weights: ranks with local steps have weights of their own")
        set_weights(self.strategy, self.optimizer, read)
        self.strategy.check_replicas(self.world, when="after set_weights")

    def change_plan(self, plan: Plan) -> None:
        """Continue under another plan with the same number of ranks, between two steps; model and
        optimizer are made anew.

        Args:    plan: the new plan, the same on every rank.
        Cost:    as state_exchange.restore; nothing is written to the disk.
        Raises:  PlanError, ConfigError for what cannot work, as for a weight whose requires_grad is
                 off; MismatchError if it differs on a rank; after another error than PlanError and
                 MismatchError the state is gone.
        """
        check_alike(self.world, named("plan", plan.as_dict()))
        plan.require(self.world.size, self.config)
        plan.require_model(self.config)
        self.plan.require_change(plan)
        check_clip(plan, self.clip)
        frozen = [p.name for p in self.model.parameters() if not (p.requires_grad or untrained(p))]
        for rank, names in enumerate(share_records(self.world, frozen)):
            if names:
                raise ConfigError(
                    f"change_plan: requires_grad of {names[0]!r} is off on rank "
                    f"{rank}, and the new plan has a new model; switch it on, change "
                    f"the plan, and switch it off again"
                )
        options = self.optimizer.options_now()
        training = self.model.training
        snapshot = take_snapshot(self.strategy, self.optimizer)
        self.close()
        self.mesh.close(world=self.world is not self._launched)
        del self.strategy, self.optimizer, self.model, self.loads
        self._build(plan)
        for name, value in options.items():
            setattr(self.optimizer, name, value)
        self.model.train(training)
        restore([snapshot], self.strategy, self.optimizer, self.world)

    def survivors(self) -> Group:
        """Return the ranks that are left after the last step: all, except the lost workers of
        asynchronous servers.

        Returns: their Group, or the world. Raises: PeerLostError, TimeoutError if a server is lost.
        """
        if self._survivors is None:
            gone = self.strategy.finish()
            self._survivors = self.world.without(gone) if gone else self.world
        return self._survivors

    def check_replicas(self) -> None:
        """Compare on every rank the weights that it shares. Raises: MismatchError with the weights
        that differ, CommError."""
        self.strategy.check_replicas(self.survivors())

    def weights_sha256(self) -> str:
        """Return a digest of the masters, the same under any plan. Returns: 64 hexadecimal digits.
        Raises: as state_dict.
        """
        return weights_digest(self.state_dict())

    def close(self) -> None:
        """Wait for a save in progress, end the threads of mesh and store, lift the memory's limit;
        the world stays open.

        Raises:  PeerLostError, TimeoutError if that save ended so.
        """
        saver = self._saver
        self._saver = None
        try:
            if saver is not None:
                saver.close()
        finally:
            self.store.close()
            if self.keeper is not None:
                self.keeper.close()
            self.mesh.close()
            self.account.limit = None

    def step(self, batch: Batch, *, local: bool = False) -> float:
        """Make one optimizer step on the *global* batch; return its loss.

        Args:    batch: (inputs, targets), each (sequences, tokens) of integers; equal on all ranks,
                 which is compared.
                 local: the batch has only this rank's own sequences, any number of one length. The
                 global batch is the sequences of all ranks that divide its rows, in rank order;
                 ranks along pp, cp and tp that share rows pass the same, a parameter server passes
                 none. If ranks update by their own rows (local steps, PipeDream) or compress their
                 sums, the weights depend on which rank has which rows.
        Returns: the global mean token loss, the same bits on every rank.
        Cost:    the strategy's, in the phase "step". To compare batches, under `control`: 16 bytes
                 per rank with each loss, and with the norm of a plan with more axes than dp; before
                 the first step and each 100th, and with `local` before each, an all-gather of 48
                 bytes per rank.
        Raises:  ShapeError, DtypeError for a batch that does not fit; MismatchError if the ranks'
                 batches differ; MemoryLimitError; DiskError (offload=all); GradientError if
                 float16's gradients overflow at the smallest scale; ConfigError for a rank without
                 rows where each needs one (local steps); PlanError for `local` on asynchronous
                 plans; CommError as all verbs (Group).
        """
        return self.start_step(batch, local=local).wait()

    def start_step(self, batch: Batch, *, local: bool = False) -> LateLoss:
        """Make a step, as `step`; the loss may not have arrived yet.

        One process on a GPU then waits only for numbers by which the host decides: fp16's and fp8's
        scales, experts' routing. Args, Raises: as step. Returns: a LateLoss; its wait() returns the
        loss.
        """
        self.world.tell_step(self.steps_done)
        # a keeper's moves (chapter 19) are counted beside the store's (chapter 20); without a keeper
        # these are the store's again
        moves = (self.keeper or self.store).traffic
        # outside of the phase "step", because only some steps compare batches here: so every step's
        # ledger has the same calls
        batch = self._meeting.take(
            batch,
            step=self.steps_done,
            local=local,
            context=self.config.context,
        )
        with (
            self.world.ledger.during("step"),
            self.store.traffic.during_step(),
            moves.during_step(),
            self.recorder.span("step", step=self.steps_done),
        ):
            loss = self.strategy.start_step(
                batch,
                self.optimizer,
                lr=self.learning_rate(self.updates_done),
                clip=self._clip,
                accumulate=self.plan.accumulate,
            )
            if self.loads.layers:
                self.loads.settle()
        if self.budget is not None:
            self.budget.step_done()
        self.steps_done += 1
        return loss
