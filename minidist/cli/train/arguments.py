"""The command line of `minidist train`: every option, in groups."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from minidist.cli.limits import add_limits
from minidist.cli.train.fitting import FEWEST_STEPS, MOST_STEPS
from minidist.cli.train.rate import add_rate
from minidist.cli.train.values import (
    GivenFlag,
    GivenValue,
    attention_pattern,
    bucket_size,
    node_counts,
    save_steps,
)
from minidist.comm.health.process_state import PATIENCE
from minidist.console import (
    MOST_RANKS,
    fraction,
    not_negative,
    number_of_bytes,
    positive,
    positive_number,
    rank_count,
    seed_number,
    whole_number,
)
from minidist.launch.transports import PROCESSES, THREADS
from minidist.nn.config import BALANCES
from minidist.observe.energy import ASSUMED_WATTS
from minidist.observe.rank_records import DIGEST_EVERY
from minidist.parallel.hybrid.hybrid import OPTIMIZERS
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.plan_options import options_of

Add = Callable[..., Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist train` to the parser."""
    for kind in (None, "store"):
        parser.register("action", kind, GivenValue)
    parser.register("action", "store_true", GivenFlag)
    groups = {
        "the job": _job,
        "an elastic job": _elastic,
        "the plan": division,
        "other strategies": _strategy,
        "ranks that exchange weights seldom": seldom,
        "device memory": memory,
        "activations": activations,
        "the data": _data,
        "the model": _model,
        "a mixture of experts": _placed_experts,
        "the training": _training,
        "checkpoints": _checkpoints,
        "the result": _result,
    }
    for title, options in groups.items():
        options(parser.add_argument_group(title).add_argument)


KINDS: dict[str, Callable[[str], Any] | None] = {
    "": None,
    "count": positive,
    "number": whole_number(0, 10**9),
    "any": whole_number(-(10**9), 10**9),
    "ranks": rank_count,
    "bytes": number_of_bytes,
    "rate": positive_number,
    "fraction": fraction,
}
"""{PlanOption.kind: the function that reads the value of such an option}."""

OF_PLAN = options_of(Plan)


def of_plan(add: Add, *names: str, otherwise: str | None = None, **changes: Any) -> None:
    """Add options that are named like fields of Plan, with the help that stands there.

    Args:    otherwise: the meaning of the default, in place of the field's; changes: further
             arguments of `add`.
    """
    for name in names:
        each, about = OF_PLAN[name]
        flag = f"--{name.replace('_', '-')}"
        text = re.sub(r"{(\w+)}", lambda found: f"--{found[1].replace('_', '-')}", about.help)
        if each.default is False:
            add(flag, action="store_true", help=text)
            continue
        meaning = otherwise or about.otherwise or str(each.default)
        meaning = re.sub(r"{(\w+)}", lambda found: f"--{found[1].replace('_', '-')}", meaning)
        given: dict[str, Any] = {"default": each.default, "help": f"{text} (default: {meaning})"}
        if about.choices:
            given["choices"] = about.choices
            given["type"] = type(about.choices[0])
        if KINDS[about.kind] is not None:
            given["type"] = KINDS[about.kind]
        if about.metavar is not None:
            given["metavar"] = about.metavar
        add(flag, **{**given, **changes})


def _job(add: Add) -> None:
    add(
        "-n",
        "--ranks",
        type=rank_count,
        metavar="N",
        help="start N ranks here (without mpirun or another launcher)",
    )
    add(
        "--transport",
        choices=(*PROCESSES, *THREADS, "sockets"),
        metavar="NAME",
        help="how ranks exchange bytes: "
        + ", ".join(PROCESSES)
        + "; threads, threads-unbuffered: -n ranks as threads "
        "of one process, for debugging (default: mpi under mpirun, else auto)",
    )
    add(
        "--adapt",
        action="store_true",
        help="measure stages and links while training, ask the planner, and change the plan when "
        "what the rest of the run gains by it exceeds what the change costs",
    )
    add(
        "--bucket-bytes",
        type=bucket_size,
        metavar="SIZE|auto",
        help="largest size of a bucket of gradients (default: 2MiB); auto: of the least exposed "
        "seconds, by the link's latency and bandwidth that `minidist bench calibrate` "
        "measured",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where arrays live (default: cpu)")
    add(
        "--graph",
        action="store_true",
        help="capture the third step as one CUDA graph, and launch that from then on (one "
        "process, with --device cuda --precision bf16)",
    )
    add(
        "--threads",
        type=whole_number(1, 4096),
        metavar="N",
        help="BLAS threads a rank or replica (default: this machine's cores // its ranks or "
        "replicas)",
    )
    add_limits(add, "of this host")
    add(
        "--patience",
        type=positive_number,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long a rank's process may be stopped (Ctrl-Z, SIGSTOP) before it is lost "
        "(default: %(default)s)",
    )


def _elastic(add: Add) -> None:
    add(
        "--elastic",
        metavar="LEAST:MOST",
        help="with -n: ranks may die; the others continue if at least this many are left, and new "
        "ranks join "
        "(default: the first loss ends the job)",
    )
    # known only so that check_one_host can name what to use instead
    for option in ("--hosts", "--ssh"):
        add(option, help=argparse.SUPPRESS)
    add(
        "--max-restarts",
        type=whole_number(0, 10**9),
        metavar="N",
        help="processes that may be started in place of lost ones (default: 0)",
    )
    add(
        "--spares",
        type=whole_number(0, MOST_RANKS),
        metavar="N",
        help="processes that wait, ready to take a lost rank's place, so that the plan stays "
        "(default: 0)",
    )
    add(
        "--elastic-wait",
        type=not_negative,
        metavar="SECONDS",
        help="how long ranks wait for a replacement before they continue with fewer (default: 0)",
    )
    add(
        "--peer-copies",
        type=positive,
        metavar="K",
        help="every K steps, keep a copy of the state in memory, and of what no other rank has "
        "one in a partner's (default: 1)",
    )


def division(add: Add) -> None:
    """Add the options for the division of the job over ranks."""
    add(
        "--plan",
        metavar="dp=N,pp=N,…",
        help="how the job is cut: ranks along the axes dp (data), pp (pipeline), ep (experts), "
        "cp (context) and tp (tensor) (default: dp=all)",
    )
    of_plan(add, "order", "placement")
    of_plan(add, "zero", default=None, otherwise="0; with --offload all 3")
    of_plan(add, "shard", "keep_gathered", "schedule", "stages_per_rank", "microbatches")
    of_plan(add, "stage_layers", "attention", "sequence_parallel", "compress")


def _strategy(add: Add) -> None:
    of_plan(add, "strategy")
    of_plan(add, "replicas", default=None)
    of_plan(add, "devices", "servers", "server_device", "server_dtype", "asynchronous")
    of_plan(add, "staleness", default=None)


def seldom(add: Add) -> None:
    """Local steps, and what the ranks do when they meet."""
    of_plan(add, "local_steps", "outer", "outer_lr", "outer_momentum")
    of_plan(add, "fragments", "delay", "mix", "outer_compress")


def memory(add: Add) -> None:
    """What a plan does to need less device memory."""
    of_plan(add, "accumulate")
    add(
        "--accumulate-tokens",
        type=positive,
        metavar="N",
        help="an update for at least N tokens: --batch is then what one pass takes, and as many "
        "passes follow each other as make N tokens",
    )
    of_plan(add, "checkpoint_blocks", nargs="?", const="all")
    of_plan(add, "offload")
    add(
        "--offload-dir",
        metavar="DIR",
        help="folder of the files of --offload all, which are removed after the run (default: "
        "the system's temporary folder)",
    )
    of_plan(add, "device_memory")


def activations(add: Add) -> None:
    """How checkpointed blocks keep their inputs, and which blocks these are."""
    of_plan(add, "keep_activations", "activation_memory")


def _data(add: Add) -> None:
    add(
        "--data",
        default="python",
        metavar="PATH",
        help="a text file, a folder of them, `shakespeare`, or `python`: the reference of every "
        "CPython; with --from and without --tokenizer a .npy file of ids",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="with --from: tokenizer.json, which makes ids of the text (needs the extra "
        "`tokenizer`)",
    )
    add(
        "--batch",
        type=positive,
        default=16,
        metavar="SEQUENCES",
        help="sequences a step, of the whole job (default: 16)",
    )
    add(
        "--context",
        type=positive,
        default=128,
        metavar="TOKENS",
        help="tokens a sequence (default: 128)",
    )
    add(
        "--validate",
        type=positive,
        default=512,
        metavar="N",
        help="most sequences of held-out text for the validation loss (default: 512)",
    )


def _model(add: Add) -> None:
    add(
        "--from",
        metavar="FILE",
        help="begin with the weights of a published model: a safetensors file (or the index of "
        "several, or their folder) with the names of GPT-2 or Llama, and config.json beside it (or "
        "--heads); the model's sizes are the file's",
    )
    add("--layers", type=positive, default=4, metavar="N", help="blocks (default: 4)")
    add("--width", type=positive, default=128, metavar="N", help="model width (default: 128)")
    add("--heads", type=positive, default=4, metavar="N", help="attention heads (default: 4)")
    add(
        "--vocab",
        type=positive,
        metavar="N",
        help="embedding rows, at least one for each symbol of the data (default: as many)",
    )
    add(
        "--positions",
        choices=["learned", "rotary"],
        default="rotary",
        help="how positions enter the model (default: rotary)",
    )
    pattern(add)
    add("--tied", action="store_true", help="one matrix for embedding and output")
    add(
        "--dropout",
        type=fraction,
        default=0.0,
        metavar="RATE",
        help="share of activations dropped (default: 0)",
    )
    add(
        "--dtype",
        choices=["float64", "float32"],
        default="float32",
        help="of weights and activations (default: float32)",
    )
    of_plan(add, "precision")


def pattern(add: Add) -> None:
    """Add the option for the keys that attention computes."""
    add(
        "--attention-pattern",
        type=attention_pattern,
        metavar="PATTERN",
        help="which keys a query sees, in blocks of 64 tokens; the others are not computed: "
        "local:N, the query's block and those before it, N tokens in all; global:G, the "
        "first G blocks; strided:N, the query's block and those N, 2N, … tokens before it; "
        "block:FILE, a line of 0 and 1 for each block of queries; joined by +, as "
        "local:256+global:2 (default: all keys up to the query)",
    )


def experts(add: Add) -> None:
    """Add the options of a mixture of experts."""
    add(
        "--experts",
        type=positive,
        metavar="E",
        help="E experts in place of each block's MLP; plan axis ep divides them (default: an MLP)",
    )
    add("--top-k", type=positive, metavar="K", help="experts of a token (default: 2)")
    add(
        "--capacity",
        type=positive_number,
        metavar="FACTOR",
        help="most tokens of a sequence for an expert, as a multiple of the even share; the "
        "rest is dropped (default: no limit)",
    )
    add(
        "--gate-noise",
        type=not_negative,
        metavar="STD",
        help="added to the gate's scores (default: 0)",
    )
    add(
        "--balance",
        choices=BALANCES,
        help="keep experts evenly loaded by a loss, by biases that move against the load, or "
        "not (default: loss)",
    )
    add(
        "--balance-weight",
        type=not_negative,
        metavar="W",
        help="of the balance loss (default: 0.01)",
    )
    add(
        "--bias-rate",
        type=not_negative,
        metavar="R",
        help="change of a bias in a step (default: 0.001)",
    )
    add(
        "--shared-experts",
        type=positive,
        metavar="S",
        help="experts that get every token, besides the others (default: none)",
    )
    add(
        "--expert-width",
        type=positive,
        metavar="N",
        help="numbers inside an expert (default: as inside the MLP, 4 × width)",
    )


def _placed_experts(add: Add) -> None:
    """Add the options of a mixture, and of its experts' placement, which the simulator does not
    support."""
    experts(add)
    add(
        "--node-limit",
        type=positive,
        metavar="M",
        help="a token chooses its experts on at most M nodes, those with the best ones "
        "(default: on any)",
    )
    add(
        "--expert-nodes",
        type=node_counts,
        metavar="N|E,E,…",
        help="with --node-limit: on how many nodes the experts count as lying, or how many "
        "experts on each (default: as the ranks along ep lie)",
    )
    add(
        "--expert-placement",
        metavar="RUN",
        help="experts that tokens of that run folder chose together, or that tokens of a node "
        "chose, lie on one node (default: by number); for a run on several nodes, resumed "
        "or new",
    )


def _training(add: Add) -> None:
    add(
        "--steps",
        type=positive,
        default=MOST_STEPS,
        metavar="K",
        help="optimizer steps (default: as many as fit into about a minute, from "
        f"{FEWEST_STEPS} to {MOST_STEPS}; {MOST_STEPS} for a run that saves, is resumed or "
        "elastic, makes local steps, or has a warm-up of its own)",
    )
    add(
        "--seed",
        type=seed_number,
        default=0,
        metavar="S",
        help="of weights and batches (default: 0)",
    )
    add(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="adamw",
        help="the optimizer (default: adamw)",
    )
    add_rate(add)
    add(
        "--clip",
        type=not_negative,
        default=1.0,
        metavar="NORM",
        help="bound of the gradients' norm; 0: none (default: 1)",
    )


def _checkpoints(add: Add) -> None:
    add(
        "--save-every",
        type=save_steps,
        metavar="K|auto",
        help="write a checkpoint each K steps, after the last, and when the job is asked to stop "
        "(SIGTERM; under srun SIGUSR1 too): it then ends with status 75. With --out, a job "
        "that Slurm or torchrun starts again continues from the newest. auto: the interval "
        "that loses the least time, by the measured seconds of a save and "
        "--interruptions-per-day",
    )
    add(
        "--interruptions-per-day",
        type=positive_number,
        metavar="N",
        help="with --save-every: how often the whole job is interrupted, on average; shows the "
        "expected goodput (the part of the time that goes into work that is kept), and at "
        "the end the measured one",
    )
    add(
        "--save-async",
        action="store_true",
        help="the steps continue while a checkpoint is written; only a copy in memory is waited for",
    )
    add(
        "--keep",
        type=positive,
        default=3,
        metavar="N",
        help="checkpoints that stay: the newest N (default: 3)",
    )
    add(
        "--resume",
        metavar="RUN",
        help="continue from the newest checkpoint of a run folder, or from a checkpoint; its "
        "options hold, and only options of how the job runs may change: -n, --transport, "
        "--device, --plan with its options, memory, more --steps (the end of the learning "
        "rate's schedule moves, its warm-up stays)",
    )


def _result(add: Add) -> None:
    add(
        "--out",
        metavar="DIR",
        help="run folder (default: runs/DATE-TIME-PROCESS; with --resume that run's)",
    )
    add("--json", metavar="FILE", help="also write metrics.json here")
    add(
        "--metrics-port",
        type=whole_number(1, 65535),
        metavar="P",
        help="serve the newest step as Prometheus text at http://127.0.0.1:P/metrics while the "
        "run lasts",
    )
    add(
        "--watts",
        type=positive_number,
        metavar="W",
        help="of one busy core, or with --device cuda of the GPU: for the estimate of energy "
        f"where no counter can be read (default: {ASSUMED_WATTS['cpu']:g}, or "
        f"{ASSUMED_WATTS['cuda']:g} of a GPU, both assumed)",
    )
    add(
        "--digest-every",
        type=whole_number(0, 10**9),
        default=DIGEST_EVERY,
        metavar="K",
        help="each K steps every rank notes a digest of the weights that others hold too, so "
        "that `minidist diagnose` sees which drifted apart; 0: never (default: %(default)s)",
    )
    add(
        "--verify",
        action="store_true",
        help="after the run, repeat its first 20 steps on one process and compare the weights",
    )
    add(
        "--why",
        action="store_true",
        help="explain a recorded step of middle length: its critical path, the lower bound, and "
        "each millisecond in which a rank stood still, with its call, line and cause; also "
        "in metrics.json and why.png",
    )
    add(
        "--watch",
        action="store_true",
        help="in place of the progress bar, the live view of `minidist watch`: each rank's "
        "time, bytes, memory, power, and the rank that is slow",
    )
    add("--quiet", action="store_true", help="print nothing")
