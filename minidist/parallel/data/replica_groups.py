"""Which ranks share a parameter: those of a strategy's group, or for some, as experts (chapter 18), others."""

from collections.abc import Iterable, Mapping, Sequence

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.parallel.step.replicas import check_equal_replicas

Others = Mapping[int, Group]
"""The group of each parameter that others share than those of the strategy's group: by id(parameter)."""


def owners(parameters: Sequence[Parameter], group: Group, others: Others) -> Group:
    """The ranks that share a run of parameters: `group` unless its first has others. All of a run have the same."""
    return others.get(id(parameters[0]), group)


def check_equal_owners(parameters: Iterable[Parameter], group: Group, others: Others, *, when: str) -> None:
    """Compare a digest of the weights over the ranks that share them.

    Cost, Raises: as check_equal_replicas, once a group.
    """
    runs: dict[int, tuple[Group, list[Parameter]]] = {group.id: (group, [])}
    for parameter in parameters:
        whose = others.get(id(parameter), group)
        runs.setdefault(whose.id, (whose, []))[1].append(parameter)
    for whose, run in runs.values():
        check_equal_replicas(run, whose, when=when)
