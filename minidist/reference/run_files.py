"""docs/reference/run-files.md: the files of a run folder, and their keys."""

import re
from typing import NamedTuple

from minidist.cli.train.elastic import RECORD
from minidist.cli.train.rings import FOLDER as RINGS
from minidist.cli.train.run_folder import MANIFEST, PAGE, WEIGHTS
from minidist.observe import rank_steps
from minidist.observe.step_log import STEP_LOG
from minidist.reference.markdown import block, code, head, page, table


class RunFile(NamedTuple):
    """A file of a run folder.

    Attributes: path  from the run folder; N stands for a number
                what  what it holds
                when  when it is there; "" for always
    """

    path: str
    what: str
    when: str = ""


FILES = [
    RunFile(
        MANIFEST,
        "every measurement, its formula, options, machine. It comes with the weights, before "
        "anything is made of them, and is completed last; `files` has the SHA-256 of the others",
    ),
    RunFile(STEP_LOG, "a line per step, while the run goes on: loss, speed, bytes, memory, energy"),
    RunFile(WEIGHTS, "the weights, in the format of safetensors; equal weights give equal files"),
    RunFile(
        "trace.json",
        "a timeline for Perfetto, a row per rank; of a long run about the first and the last 75 "
        "steps",
    ),
    RunFile("loss.png", "the loss over the steps"),
    RunFile(
        f"{rank_steps.FOLDER}/N.jsonl",
        "of each rank a line per step: processor seconds, waits, memory, messages",
    ),
    RunFile(
        f"{RINGS}/N.ring",
        "of each rank its flight recorder: a ring of its last calls, which outlives the rank",
    ),
    RunFile("why.png", "the critical path of a step", "with `--why`"),
    RunFile("step-N/manifest.json", "what the shards of a checkpoint hold", "with `--save-every`"),
    RunFile("step-N/shard-N.safetensors", "a rank's shard of a checkpoint", "with `--save-every`"),
    RunFile(RECORD, "who joined and who was lost, and when", "with `--elastic`"),
    RunFile(PAGE, "the page of the run", "after `minidist report`"),
    RunFile("storm.jsonl", "each fault of a storm", "of `minidist storm --out`"),
    RunFile("storm.json", "the figures of a storm", "of `minidist storm --out`"),
    RunFile("storm.png", "the picture of a storm", "of `minidist storm --out`"),
]

KEYS = {
    "parameters": "number of parameters; `parameter_bytes`: their bytes",
    "parameter_bytes": "",
    "weights_sha256": "digest of all weights",
    "plan": "every field of the plan",
    "size": "number of ranks at the end",
    "transport": "what carried the bytes",
    "threads": "BLAS threads of a rank",
    "device": "cpu or cuda",
    "optimizer_moments": "moments that the optimizer keeps of each parameter",
    "skipped_steps": "steps without an update, because fp16 overflowed",
    "losses": "training loss of each step, in nats per token",
    "validation_loss": "loss of held-out text; null if none was measured",
    "step_seconds": "median seconds of a step",
    "tokens_per_second": "of the whole job",
    "steps": "steps of this job, without those before `--resume`, or before the last change of "
    "plan with `--adapt`: those that bytes and messages count",
    "resumed_from": "steps that were done before; null for a new run",
    "checkpoint": "folder, steps and seconds of the saves, and the goodput; null without saves",
    "vocabulary": "the symbols of the data",
    "config": "the sizes of the model",
    "data_left_out": "files of `--data` that were left out, and why",
    "options": "every option of the command",
    "files": "SHA-256 of each file",
    "energy": "joules of the run, per step and token and by rank; counters, or watts of the estimate",
    "memory_limit_bytes": "limit of `--memory-limit`; null without",
    "formula": "bytes and messages of all ranks and steps by formula",
    "stage_layers": "layers of each pipeline stage; null without a pipeline",
    "machine": "date, processor, cores, versions, and the command that repeats the run",
    "versions": "of Python and the libraries",
    "ranks": "of each rank: coordinates, bytes and messages by axis and verb, bytes to each other "
    "rank and node, host, cores, memory (now and peak, by category), shared bytes",
    "trace": "number of spans in `trace.json`, and how many were left out",
    "why": "critical path, lower bound, exposed milliseconds with causes; with `--why`",
    "verify": "differences from one process; with `--verify`",
    "experts": "tokens that chose each expert, and that it processed; with `--experts`",
    "activation_choice": "what each layer computes again; with `--activation-memory`",
    "adapt": "with `--adapt`: how often the planner was asked, and each change of plan: step, from, "
    "to, seconds of a step measured before (`now`), expected (`then`) and measured after, steps "
    "left, gain and price in seconds, bytes to move to a rank",
    "elastic": "generations of an elastic job: size, ranks that joined and were lost",
    "generation": "number of the last generation; of an elastic job",
    "generations": "the generation of each step; of an elastic job",
}
"""{key of metrics.json: its meaning}; "" for a key that the one before describes."""

STEP_KEYS = {
    "step": "number of the step, from 1",
    "steps": "steps of the run",
    "time": "seconds since 1970",
    "loss": "training loss in nats per token; null if it is not finite",
    "seconds": "of this step",
    "tokens_per_second": "of the whole job",
    "joules": "of rank 0, so far",
    "energy_source": "where the joules come from",
    "memory": "bytes that rank 0 holds now, by category",
    "sent_bytes": "bytes that rank 0 has sent so far, by axis and verb",
}
"""{key of a line of metrics.jsonl: its meaning}."""


def run_files_page() -> str:
    """Return the page."""
    lines = head(
        "Files of a run",
        "After this page you know each file of a run folder, and each key of its JSON files.",
    )
    lines += table(
        ["file", "what it holds", "when"],
        [(code(each.path), each.what, each.when or "always") for each in FILES],
    )
    lines += ["", f"## {MANIFEST}"]
    rows: list[tuple[str, str]] = []
    for key, meaning in KEYS.items():
        if not meaning:
            continue
        rows.append((code(key), meaning))
    lines += table(["key", "meaning"], rows)
    lines += ["", f"## {STEP_LOG}"]
    lines += table(["key", "meaning"], [(code(key), told) for key, told in STEP_KEYS.items()])
    lines += ["", f"## {rank_steps.FOLDER}/"]
    story = (rank_steps.__doc__ or "").split("\n\n")
    first = next(index for index, part in enumerate(story) if part.startswith("The first line"))
    lines += ["", " ".join(story[first].split()), *block(story[first + 1])]
    return page(lines)


def file_of(path: str) -> RunFile | None:
    """Return the row of a file of a run folder, or None."""
    for each in FILES:
        pattern = re.escape(each.path).replace("N", r"\d+")
        if re.fullmatch(pattern, path):
            return each
    return None
