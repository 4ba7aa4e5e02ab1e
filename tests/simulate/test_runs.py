"""Files of measured steps: what a row says, and mistakes told with their line."""

from dataclasses import replace
from pathlib import Path

import pytest

from minidist.errors import ConfigError
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.models import model
from minidist.simulate.runs import read_runs

HEAD = "layers,width,heads,sequence,vocab,devices,batch,plan,seconds\n"
TINY = "2,64,4,32,128"


def test_a_file_of_runs(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(
        f'# measured on a Sunday\n{HEAD}{TINY},2x4,16,"dp=4,tp=2",0.5\n\n{TINY},4,16,,0.25\n'
    )
    first, second = read_runs(path, "a100-80g")
    assert (first.plan, first.batch, first.seconds) == (Plan(dp=4, tp=2, precision="bf16"), 16, 0.5)
    assert (first.config.width, first.config.context, first.cluster.size) == (64, 32, 8)
    assert (second.label, second.plan.dp, second.cluster.nodes) == ("2 x 64 dp=4", 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD.replace("seconds", "second") + f"{TINY},8,16,dp=8,1\n",
            "no column 'second'; did you mean seconds",
        ),
        (HEAD + f"{TINY},8,16,dp=8,\n", "line 2: it lacks seconds"),
        (HEAD + f"{TINY},8,16,dp=8,0\n", "line 2: seconds=0"),
        (HEAD + f"{TINY},8,16,dp=8,fast\n", "line 2: could not convert"),
        (HEAD + f"{TINY},12,16,dp=8,1\n", "line 2: 12 devices do not fill"),
        (HEAD + "2,,4,32,128,8,16,dp=8,1\n", "line 2: it lacks width"),
    ],
)
def test_mistakes_in_a_file_name_the_line(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_runs(path, "a100-80g")
    with pytest.raises(ConfigError, match="No such file"):
        read_runs(tmp_path / "none.csv", "a100-80g")


@pytest.mark.parametrize("size", ["1x8", "64", "8x8x8"])
def test_a_cluster_with_its_size_is_told_that_runs_say_it(size: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=f"cluster a100-80g:{size}: each run says .* write only the name, a100-80g$",
    ):
        read_runs(tmp_path / "runs.csv", f"a100-80g:{size}")


def read(folder: Path, head: str, row: str):
    path = folder / "runs.csv"
    path.write_text(f"seconds,devices,batch,{head}\n{row}\n")
    (run,) = read_runs(path, "a100-80g")
    return run


def test_a_row_names_its_own_machine_and_what_it_measured_of_memory(tmp_path):
    run = read(tmp_path, "model,cluster,memory", "1.5,8x8,64,gpt2,h100,40")
    assert (run.cluster.name, run.cluster.size) == ("h100", 64)
    assert run.memory_bytes == 40 * 2**30
    assert read(tmp_path, "model", "1.5,8x8,64,gpt2").memory_bytes is None


def test_sizes_of_a_llama_and_of_a_named_model_with_fewer_layers(tmp_path):
    head = "layers,width,heads,sequence,vocab,kv_heads,mlp_width,family,tied"
    run = read(tmp_path, head, "1,8,8,80,8192,64,4096,32000,8,28672,llama,no")
    assert run.config == model("llama2-70b")
    run = read(tmp_path, "model,layers", "1,8,8,llama3-405b,7")
    assert run.config == replace(model("llama3-405b"), layers=7)
    assert read(tmp_path, "model,tied", "1,8,8,llama2-7b,yes").config.tied


def test_a_microbatch_gives_the_passes_of_a_step(tmp_path):
    """Of 64 sequences on 4 data ranks, 2 at a time: 8 passes, or 8 microbatches of a pipeline."""
    row = '1,{},64,gpt2,"{}",2'
    assert read(tmp_path, "model,plan,microbatch", row.format(4, "dp=4")).plan.accumulate == 8
    piped = read(tmp_path, "model,plan,microbatch", row.format(8, "dp=4,pp=2")).plan
    assert (piped.microbatches, piped.accumulate) == (8, 1)


def test_options_of_a_pipeline_and_of_tensor_parallelism(tmp_path):
    head = "model,plan,schedule,stages_per_rank,microbatches,sequence_parallel,shard,zero"
    plan = read(tmp_path, head, '1,2x8,64,gpt2,"dp=4,pp=2,tp=2",interleaved,2,4,yes,2,1').plan
    assert (plan.stages, plan.sequence_parallel, plan.shard) == (4, True, 2)
    plan = read(tmp_path, "model,plan,stage_layers", '1,2,8,gpt2,pp=2,"5,7"').plan
    assert plan.stage_layers == "5,7"
    assert not read(tmp_path, "model,sequence_parallel", "1,8,8,gpt2,yes").plan.sequence_parallel


@pytest.mark.parametrize(
    ("head", "row", "message"),
    [
        ("model,microbatch", "1,8,12,gpt2,1", "12 sequences is no multiple of microbatch=1 on 8"),
        ("model,microbatch", "1,8,16,gpt2,0", "no multiple of microbatch=0"),
        ("model,tied", "1,8,8,gpt2,true", "tied=true: choose yes or no"),
        ("model,cluster", "1,8,8,gpt2,h10", "line 2: no cluster 'h10'.*h100"),
        ("model,memory", "1,8,8,gpt2,much", "line 2: could not convert"),
        (
            "layers,width,heads,sequence,vocab,family",
            f"1,8,8,{TINY},llamas",
            "family=llamas: choose gpt or llama",
        ),
    ],
)
def test_mistakes_in_the_further_columns(tmp_path, head, row, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, head, row)
