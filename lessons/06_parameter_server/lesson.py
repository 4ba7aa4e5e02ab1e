"""Lesson 06: the parameter server: equal to one process or its replay; traffic, stragglers, losses.

mpirun -n 4 python lessons/06_parameter_server/lesson.py
python lessons/06_parameter_server/lesson.py                        # no launcher: four threads
python lessons/06_parameter_server/lesson.py --break no-bound       # see README.md, section 9
"""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import plural, size_text
from minidist.device import account
from minidist.device.backend import random_bits
from minidist.errors import PeerLostError
from minidist.grading import load_module
from minidist.lessons.lab import difference, new_model, weights
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPTConfig
from minidist.optim import SGD, Adam
from minidist.parallel.data.async_parameter_server import AsyncParameterServer
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.parameter_server import ParameterServer, plain_server, plain_worker
from minidist.parallel.hybrid.hybrid import Plan, Trainer

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "06")
STEPS = 6
NAP = 0.02
SLOW = 4.0  # seconds of a slow worker's step, where the others take 1, on the virtual clock


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("2  Synchronous: the weights of one process")
    equal_weights(group, page)
    page.heading("3  What passes the server's link, and a rank's of a ring")
    if group.rank == 0:
        traffic(page)
    group.barrier()
    page.heading("4  A straggler (N3:35)")
    stragglers(group, page)
    page.heading("5  Asynchronous: how stale, and the same again in one process")
    stale(group, page)
    page.heading("6  A worker is lost")
    if group.rank == 0:
        lost(page)
    page.heading("7  Servers with more digits than workers (N3:37)")
    if group.rank == 0:
        digits(page)
    group.barrier()


# --------------------------------------------------------------------------------------- 2 equality


def equal_weights(group: Group, page: Page) -> None:
    """Compare the weights of the plain loop and of the library, with one server and two, with those
    of one process."""
    workers = group.size - 1
    target = lab.serial(STEPS)
    model = new_model(lab.CONFIG)
    if group.rank < workers:
        plain_worker(model, group, workers, map(lab.batch, range(STEPS)))
    else:
        plain_server(model, Adam(list(model.parameters()), lab.RATE), group, workers, STEPS)
    rows = [["plain loop", f"{workers} + 1", *_beside(weights(model), target)]]
    for servers in range(1, min(3, group.size)):
        mine = lab.train(group, steps=STEPS, servers=servers)["weights"]
        if group.rank == 0:
            rows.append(
                ["ParameterServer", f"{group.size - servers} + {servers}", *_beside(mine, target)]
            )
    page.table(
        f"Rank 0's weights after {STEPS} steps, float64, Adam on the server",
        ["", "workers + servers", "off one process by", ""],
        rows,
    )


def _beside(mine: np.ndarray, target: np.ndarray) -> tuple[str, str]:
    error = difference(mine, target)
    return f"{error:.1e}", "ok" if error < 1e-10 else "off"


# ---------------------------------------------------------------------------------------- 3 traffic


def traffic(page: Page) -> None:
    """Show the bytes through one server by number of workers, and through the fullest of several
    servers."""
    rows = []
    for workers in range(1, 8):
        found = lab.traffic(workers)
        nbytes = found["model"]
        ring = FORMULAS["all_reduce", "ring"].bytes_of(Case(size=workers, nbytes=nbytes)) / workers
        rows.append(
            [
                workers,
                size_text(found["sent"] + found["pushed"]),
                size_text(2 * workers * nbytes),
                verdict(found["sent"] + found["pushed"], 2 * workers * nbytes),
                size_text(2 * found["ring"]),
                size_text(2 * ring),
                verdict(found["ring"], ring, 0.01),
            ]
        )
    page.table(
        f"One step, a model of {size_text(nbytes)}: in and out of the server, and of a rank of a ring",
        ["workers", "server", "2N models", "", "a rank", "4(N-1)/N models", ""],
        rows,
    )
    rows = []
    for servers in (1, 2, 3):
        found = lab.traffic(4, servers)
        rows.append(
            [
                servers,
                size_text(found["sent"] + found["received"]),
                size_text(2 * 4 * nbytes / servers),
                size_text(found["pushed"] + found["given"]),
                size_text(2 * 4 * nbytes),
                verdict(found["pushed"] + found["given"], 2 * 4 * nbytes),
            ]
        )
    page.table(
        "4 workers: keys divided among servers by size",
        ["servers", "the fullest", "2N/S models", "all servers", "2N models", ""],
        rows,
        note="a key is never cut, so the fullest server has up to one key more than its share",
    )


# ------------------------------------------------------------------------------------- 4 stragglers


def stragglers(group: Group, page: Page) -> None:
    """Show how long rank 0's steps take while the last worker sleeps in each of its own."""
    slow = {group.size - 2: NAP} if group.size > 2 else {}
    rows = []
    for name, options in (
        ("all-reduce (DDP)", None),
        ("synchronous", {}),
        ("asynchronous, staleness 2", {"strategy": AsyncParameterServer, "staleness": 2}),
        ("asynchronous, any staleness", {"strategy": AsyncParameterServer, "staleness": None}),
    ):
        job = {"strategy": DDP} if options is None else {"servers": 1, **options}
        mine = lab.train(group, steps=STEPS, slow=slow, **job)
        rows.append(
            [
                name,
                f"{1e3 * mine['ends'][STEPS - 3] / (STEPS - 2):.1f} ms",
                f"{1e3 * mine['ends'][-1]:.0f} ms",
            ]
        )
    title = f"One of the ranks naps {1e3 * NAP:.0f} ms before each of {STEPS} steps"
    note = (
        "with any staleness rank 0 does not wait for it; with a bound it does, when it is so "
        "far ahead"
    )
    if not slow:
        title = f"{STEPS} steps, and no worker naps"
        note = "rank 0 is the only worker: start three ranks or more"
    page.table(title, ["", "rank 0: a step", "rank 0: all steps"], rows, note=note)


# -------------------------------------------------------------------------------------- 5 staleness


def stale(group: Group, page: Page) -> None:
    """Show asynchronous runs by staleness bound: staleness of the updates, the replay's weights,
    the loss."""
    workers = group.size - 1
    rows = []
    slow = {workers - 1: NAP} if workers > 1 else {}
    for bound in (0, 2, None):
        ranks = gather_records(
            group,
            lab.train(
                group,
                steps=STEPS,
                slow=slow,
                servers=1,
                strategy=AsyncParameterServer,
                staleness=bound,
            ),
        )
        if ranks is None:
            continue
        seen = [late for _, late in lab.staleness(ranks[workers])]
        error = float(np.abs(ranks[0]["weights"] - lab.replayed(ranks, workers)).max())
        rows.append(
            [
                bound if bound is not None else "any",
                len(seen),
                f"{np.mean(seen):.1f}",
                max(seen),
                f"{ranks[0]['held_out']:.3f}",
                f"{error:.0e}",
                "ok" if error < 1e-10 else "off",
            ]
        )
    page.table(
        f"{plural(workers, 'worker')}, {STEPS} steps each" + ", one of them slow" * bool(slow),
        ["staleness", "updates", "mean late", "most", "held-out loss", "off its replay", ""],
        rows,
        note="late: updates that others made between a worker's reading the weights and its own "
        "update",
    )


# ------------------------------------------------------------------------------------------- 6 lost


def lost(page: Page) -> None:
    """Run three workers of an asynchronous job; the second ends in step 3."""
    ranks = lab.job(3, steps=STEPS, dies={1: 3}, strategy=AsyncParameterServer, staleness=1)
    done = [sum(update[0] == worker for update in ranks[3]["record"]) for worker in range(3)]
    rows = [
        [f"worker {worker}", done[worker], "lost" if ranks[worker] is None else "finished"]
        for worker in range(3)
    ]
    page.table(
        f"Steps of {STEPS} that the server saw",
        ["", "steps", ""],
        rows,
        note=ranks[3]["lost"][1].split(" (at")[0],
    )


# ----------------------------------------------------------------------------------------- 7 digits

KINDS: dict[str, dict[str, Any]] = {
    "float32, float32": {},
    "float32, float64": {"server_dtype": "float64"},
    "bf16, float32": {"precision": "bf16"},
}
"""Workers' weights and gradients, servers' masters and sums."""
EACH = {"float32, float32": (4, 16), "float32, float64": (4, 36), "bf16, float32": (2, 18)}
"""Bytes per parameter: pushed by a worker, kept by the servers (what is sent, masters, sums, m
and v)."""


def digits(page: Page) -> None:
    """Compare two workers and a server by dtypes: what travels, what the server keeps, the error
    against float64."""
    exact = md.run(trained, {}, "float64", size=1)[0]["weights"]
    rows = []
    for name, kind in KINDS.items():
        ranks = md.run(trained, {**kind, "strategy": "parameter-server"}, "float32", size=3)
        count = sum(array.size for array in exact.values())
        (pushed, kept) = EACH[name]
        error = max(
            float(np.abs(ranks[0]["weights"][key] - array).max()) for key, array in exact.items()
        )
        rows.append(
            [
                name,
                ranks[0]["sent"],
                verdict(ranks[0]["sent"], pushed * count),
                ranks[2]["kept"],
                verdict(ranks[2]["kept"], kept * count),
                f"{error:.1e}",
            ]
        )
    page.table(
        f"{STEPS} steps, two workers and a server, {count:,} parameters",
        ["workers, servers", "a worker pushes", "", "the server keeps", "", "off float64 by"],
        rows,
        note="bytes, a step and between steps; the last column: of the weights that servers "
        "tell, beside one process in float64",
    )


def trained(world: Group, plan: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return what a rank sent in a step, what it holds between steps, and the run's weights."""
    config = GPTConfig(vocabulary=32, context=8, layers=1, width=32, heads=4, dtype=dtype)
    with account.use(account.MemoryAccount()) as memory:
        trainer = Trainer(
            Plan(dp=world.size, **plan), config, world, seed=1, optimizer="adam", lr=1e-3, clip=None
        )
        for step in range(STEPS):
            ids = (random_bits(f"lesson 06, step {step}", 0, range(4 * 9)) % np.uint64(32)).astype(
                np.int64
            )
            rows = ids.reshape(4, 9)
            trainer.step((rows[:, :-1], rows[:, 1:]))
        kept = sum(memory.now[kind] for kind in ("parameters", "gradients", "optimizer"))
        sent = sum(world.ledger.sent_bytes("step").get("dp", {}).values()) // STEPS
        result = {"sent": sent, "kept": kept, "weights": trainer.state_dict()}
        trainer.close()
    return result


# ----------------------------------------------------------------------------------------- Break it


class PushesTwice(ParameterServer):
    """Push twice, as a worker that does not know whether its push arrived; the server adds up all
    pushes."""

    def gradients(self, batch: Any, accumulate: int) -> float:
        loss = super().gradients(batch, accumulate)
        if self.group.rank == 0:
            for shard in self.shards:
                for vector in shard.gradients:
                    vector *= 2
        return loss


def push_twice() -> None:
    """Compare the weights with one process's, by SGD and Adam: right, and with one worker's
    gradients counted twice."""
    for optimizer in (SGD, Adam):
        target = lab.serial(8, optimizer)
        for name, strategy in (("right", ParameterServer), ("worker 0 pushes twice", PushesTwice)):
            mine = lab.job(3, steps=8, strategy=strategy, optimizer=optimizer)[0]["weights"]
            print(
                f"{optimizer.__name__}, {name}: off one process by "
                f"{np.abs(mine - target).max():.1e}; expected: less than 1e-10"
            )


def no_bound() -> None:
    """Run a very slow worker, with and without a bound; show the staleness of its updates, on a
    clock and here."""
    for bound in (1, None):
        updates, ends = lab.on_a_clock(12, [1.0, 1.0, SLOW], bound)
        late = [
            number - update.versions[0]
            for number, update in enumerate(updates)
            if update.worker == 2
        ]
        last = next(
            end
            for update, end in zip(updates, ends, strict=True)
            if (update.worker, update.step) == (0, 11)
        )
        print(
            f"staleness {bound if bound is not None else 'any'}, on a clock on which a step "
            "takes workers 0 and 1 "
            f"one second and worker 2 {SLOW:g}:\n  rank 0 has done its 12 steps after {last:g} "
            "s; the slow worker's "
            f"updates are late by {late}; held-out loss {lab.loss_after(updates, 3):.3f}; expected "
            "if no worker waited: 12 s, late by 8 = 2 workers x 4 steps"
        )
        ranks = lab.job(3, steps=12, slow={2: NAP}, strategy=AsyncParameterServer, staleness=bound)
        late = [stale for worker, stale in lab.staleness(ranks[3]) if worker == 2]
        print(
            f"  here, where worker 2 naps {1e3 * NAP:.0f} ms: after "
            f"{1e3 * ranks[0]['ends'][-1]:.0f} ms; late by {late}"
        )


def lose_a_worker() -> None:
    """Kill a worker's process in step 3 of an asynchronous job."""
    ranks = lab.job(
        3, steps=8, transport="auto", dies={1: 3}, strategy=AsyncParameterServer, staleness=1
    )
    print(ranks[3]["lost"][1])
    for worker in (0, 2):
        losses = ranks[worker]["losses"]
        print(
            f"worker {worker} has done {len(losses)} steps, expected 8 although worker 1 is lost; "
            f"its last loss {losses[-1]:.3f}"
        )


def lose_a_server() -> None:
    """Kill the server's process: no other rank has its keys."""
    print("expected: no worker can make step 3, and the job ends with one error", flush=True)

    def job(world: Group) -> None:
        model = new_model(lab.CONFIG)
        server = ParameterServer(model, world, servers=2)
        optimizer = Adam(server.parameters, lab.RATE)
        for step in range(8):
            if world.rank == 3 and step == 3:
                lab.die(world)
            try:
                server.step(lab.batch(step), optimizer)
            except lab.md.errors.PeerLostError as error:
                if world.rank == 0:
                    print(f"worker 0: {str(error).splitlines()[0]}", flush=True)
                raise

    lab.md.run(job, size=4, transport="auto")


BREAKS = {
    "push-twice": Break(push_twice, says="Adam, worker 0 pushes twice: off one process by 8."),
    "no-bound": Break(no_bound, says="late by [8, 8, 8, 0"),
    "lose-a-worker": Break(lose_a_worker, says="was killed by SIGKILL"),
    "lose-a-server": Break(lose_a_server, says="killed by SIGKILL", error=PeerLostError),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
