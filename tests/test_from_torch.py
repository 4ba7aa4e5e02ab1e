"""docs/howto/from-torch.md: every name in its table exists, and its programs print what the page
shows, those of PyTorch where PyTorch is installed."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import Command, File, parts
from imports import ROOT

import minidist as md

PAGE = (ROOT / "docs/howto/from-torch.md").read_text(encoding="utf-8")
NEEDS_TORCH = "needs PyTorch: the extra `bench`"


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table behind a line, without its head."""
    behind = PAGE.partition(heading)[2]
    rows = re.search(r"(?:^\|.*\n)+", behind, re.MULTILINE)
    assert rows, heading
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows[0].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in cells]


def programs() -> dict[str, str]:
    return {part.name: part.text for part in parts(PAGE) if isinstance(part, File)}


def shown_by(command: str) -> list[str]:
    """Return the lines that the page shows of a command."""
    found = [part for part in parts(PAGE) if isinstance(part, Command) and part.text == command]
    assert len(found) == 1, command
    return found[0].output


def printed(folder: Path, *command: str, edit: tuple[str, str] = ("", "")) -> list[str]:
    """Return the lines that a command prints in a folder with the page's programs; `edit`: a text
    of the programs, and what stands for it."""
    for name, text in programs().items():
        (folder / name).write_text(text.replace(*edit) if edit[0] else text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *command]
        if command[0] != "python"
        else [sys.executable, command[1]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


# ------------------------------------------------------------------------------------------- names


def ours(name: str) -> object:
    """Return what a name of the table means here. Raises: AttributeError, ImportError."""
    if name.startswith("world."):
        world = md.run(lambda group: group, size=1)[0]
        return getattr(world, name.removeprefix("world."))
    if name.startswith("minidist."):
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    found: object = md
    for attribute in name.split(".")[1:]:
        found = getattr(found, attribute)
    return found


def our_names(text: str) -> list[str]:
    return re.findall(r"`((?:md|world|minidist)\.[\w.]+)`", text)


def test_every_name_of_minidist_exists() -> None:
    names = our_names(PAGE)
    assert len(names) > 30
    for name in names:
        ours(name)


@pytest.mark.parametrize("name", ["world.all_reduced", "md.Zero4", "minidist.data.sampler.Sampler"])
def test_a_wrong_name_is_found(name: str) -> None:
    with pytest.raises(AttributeError):
        ours(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of its imports
def test_every_name_of_pytorch_exists() -> None:
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    from torch import distributed, multiprocessing, nn
    from torch.distributed import device_mesh, fsdp, pipelining, tensor
    from torch.distributed import optim as sharded_optimizers
    from torch.distributed.tensor import parallel
    from torch.nn import utils
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import distributed as samplers

    roots = {"dist": distributed, "mp": multiprocessing, "nn": nn, "torch": torch}
    roots["DistributedDataParallel"] = DistributedDataParallel
    homes = [distributed, device_mesh, fsdp, pipelining, tensor, sharded_optimizers, parallel]
    homes += [utils, samplers, nn.parallel]
    names = re.findall(r"`([\w.]+)`", "\n".join(row[0] for row in table("## Names")))
    assert len(names) > 30
    for name in names:
        first, *rest = name.split(".")
        if name == "torchrun":
            assert importlib.util.find_spec("torch.distributed.run")
            continue
        found = roots.get(first) or next(
            getattr(home, first) for home in homes if hasattr(home, first)
        )
        for attribute in rest:
            found = getattr(found, attribute)


# ---------------------------------------------------------------------------------------- programs


def test_each_line_of_the_comparison_is_in_its_program() -> None:
    sources = programs()
    rows = table("What each line became")
    assert len(rows) > 8
    for theirs, mine in rows:
        assert theirs.strip("`") in sources["toy_torch.py"]
        assert mine.strip("`") in sources["toy_minidist.py"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_port_prints_the_shown_losses_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    lines = printed(tmp_path, "minidist", "launch", "-n", str(size), "toy_minidist.py")
    assert lines == shown_by("minidist launch -n 2 toy_minidist.py")


@pytest.mark.parametrize(
    "edit",
    [
        ("array.T for", "array.T.copy() * 1.0001 for"),
        ("/ divisor", "/ labels.size"),
        ("(inputs, labels), optimizer", "(inputs[::-1], labels), optimizer"),
    ],
)
def test_a_wrong_port_prints_other_losses(tmp_path: Path, edit: tuple[str, str]) -> None:
    lines = printed(tmp_path, "minidist", "launch", "-n", "2", "toy_minidist.py", edit=edit)
    assert lines != shown_by("minidist launch -n 2 toy_minidist.py")


def test_pytorchs_program_prints_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    command = "torchrun --standalone --nproc-per-node 2 toy_torch.py"
    run = ("torch.distributed.run", *command.split()[1:])
    assert printed(tmp_path, *run) == shown_by(command)
    assert shown_by(command) == shown_by("minidist launch -n 2 toy_minidist.py")


def test_a_program_of_pytorch_communicates_by_minidist(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    command = "python torch_gradients.py"
    assert printed(tmp_path, *command.split()) == shown_by(command)
