"""The public names: `dir(md)` lists them, each has a docstring, and `import minidist` loads none of
them."""

import pydoc
import re
import signal
import subprocess
import sys

import pytest

import minidist as md

PUBLIC = [
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
    "__version__",
    "errors",
    "init",
    "nn",
    "ops",
    "optim",
    "plan_for",
    "run",
    "simulate",
]
HEAVY = {
    "numpy",
    "mpi4py",
    "cupy",
    "rich",
    "matplotlib",
    "psutil",
    "msgpack",
    "safetensors",
    "threadpoolctl",
    "prometheus_client",
}


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    assert dir(md) == PUBLIC
    assert sorted([*md.__all__, "__version__"]) == PUBLIC


def test_dir_stays_the_same_after_use() -> None:
    code = "import minidist as md, minidist.nn; md.Trainer; print(dir(md))"
    assert _output(code) == str(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name: str) -> None:
    assert pydoc.getdoc(getattr(md, name)) or name == "__version__"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        AttributeError,
        match="no attribute 'Tensors'; it offers DDP, Group, Mesh, Pipeline, Plan, Tensor, Trainer, "
        "Zero1, Zero2, Zero3, errors, init, nn, ops, optim, plan_for, run, simulate",
    ):
        md.Tensors  # noqa: B018


def test_help_shows_the_public_names_and_no_machinery() -> None:
    text = pydoc.plain(pydoc.render_doc(md))
    assert "class Plan(" in text and "class Trainer(" in text and "class Mesh(" in text
    # from Python 3.13 on a line for each argument
    assert re.search(r"run\(\s*fn: ", text) and "init(" in text
    assert "__getattr__(name" not in text and "importlib" not in text


def test_import_loads_no_library() -> None:
    """Under 0.3 s: nothing but this package's own few lines and importlib is read."""
    code = (
        "import sys; before = set(sys.modules); import minidist; "
        "print(sorted(set(sys.modules) - before))"
    )
    loaded = _output(code, "-S", "-E")
    assert "'minidist'" in loaded and "'minidist.launch'" not in loaded
    assert not [name for name in HEAVY if f"'{name}'" in loaded]


def _output(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_ctrl_c_while_our_command_is_imported_prints_no_traceback() -> None:
    code = """
import os, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        os.kill(os.getpid(), signal.SIGINT) if name == "typing" else None
sys.argv[0] = "/bin/minidist"
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules.pop("typing", None)
sys.meta_path.insert(0, CtrlC())
import minidist
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("name", ["Trainer", "Mesh"])
def test_help_of_a_constructor_says_where_its_arguments_are(name: str) -> None:
    assert f"as in help(minidist.{name})" in pydoc.getdoc(getattr(md, name).__init__)


def test_help_of_simulate_says_how_to_call_it() -> None:
    """Also where other code has imported its package, which then has the name."""
    code = "import minidist as md, minidist.simulate; help(md.simulate)"
    text = _output(code)
    assert "minidist.simulate(plan, config, cluster, batch=1024)" in text
    assert "simulate.simulate.simulate" in text
