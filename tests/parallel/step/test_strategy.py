"""One protocol: every data axis has its signatures, and what composes strategies knows them by it
alone."""

import inspect
import re
from typing import Any

import pytest
from imports import imports, modules

from minidist.parallel.data.data_parallel import DataParallel
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.parameter_server import ParameterServer
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.step.single import Single
from minidist.parallel.step.strategy import DataAxis, Strategy
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

AXES = [DDP, Zero1, Zero2, Zero3]


def public(cls: type) -> list[str]:
    return [
        name
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]


@pytest.mark.parametrize(
    ("protocol", "strategy"),
    [
        *((DataAxis, axis) for axis in AXES),
        *((Strategy, found) for found in (*AXES, Single, DataParallel, ParameterServer, Hybrid)),
    ],
)
def test_a_strategy_has_the_signatures_of_its_protocol(protocol: Any, strategy: Any) -> None:
    """Names, kinds and defaults; more options, each with a default, may follow."""
    for name in public(protocol):
        asked, given = (
            inspect.signature(getattr(cls, name)).parameters for cls in (protocol, strategy)
        )
        same = [parameter.replace(annotation=None) for parameter in asked.values()]
        assert [parameter.replace(annotation=None) for parameter in given.values()][
            : len(same)
        ] == same, name
        assert all(
            parameter.default is not parameter.empty for parameter in [*given.values()][len(same) :]
        )


def test_only_parallelize_names_a_strategy() -> None:
    """One module of chapter 17 chooses a strategy by the plan; the others ask it through the
    protocol."""
    strategies = {cls.__module__ for cls in (*AXES, DataParallel, ParameterServer)}
    chooser = "minidist.parallel.hybrid.parallelize"
    composing = [module for module in modules() if module.startswith("minidist.parallel.hybrid.")]
    assert len(composing) > 8
    assert strategies <= {found.imported for found in imports(chooser)}
    assert [
        str(found)
        for module in composing
        for found in imports(module)
        if found.imported in strategies and module != chooser
    ] == []


def test_the_command_does_not_branch_by_the_type_of_a_strategy() -> None:
    names = "|".join(cls.__name__ for cls in (*AXES, DataParallel, ParameterServer, Hybrid, Single))
    commands = [path for module, path in modules().items() if module.startswith("minidist.cli.")]
    assert len(commands) > 15
    assert [
        path
        for path in commands
        if re.search(rf"isinstance\([^)]*\b({names})\b", path.read_text("utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        (DDP, (False, False, False)),
        (Zero1, (False, False, True)),
        (Zero2, (False, True, True)),
        (Zero3, (True, True, True)),
    ],
)
def test_what_an_axis_says_of_itself(axis: type[DataAxis], says: tuple[bool, bool, bool]) -> None:
    assert (axis.computes_without_rows, axis.reduces_each_pass, axis.divides_state) == says
