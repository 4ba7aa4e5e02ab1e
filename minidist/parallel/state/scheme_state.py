"""Chapter 21 in chapter 26: the state that a compression scheme keeps from step to step, as entries
of a training's state.

Scheme.errors are the parts of gradients that were not sent yet. The weights must still get them,
from any rank. Under the same plan each rank gets its own errors back, and the run continues with
the same bits. Under another plan the errors of the old ranks are distributed to the new ranks in
turn and added up. So the sum, which the weights must get, stays the same.

    kind                          numbers, of a parameter
    worker.all_reduce.3           what rank 3 of the ranks that sum it has not sent
    server.all_reduce.0           what all of them have not sent of the sum, each of its chunk
    scheme.7.NAME                 a further array of world rank 7: only for the same plan

With tensor and pipeline parallelism a gradient may be summed outside the data axis too (a tied
table at both ends). Then each of the S summands counts as ranks of its own: rank g of the data axis
with summand s has number g S + s.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from minidist.autograd.tensor import Parameter
from minidist.comm.chunks import bounds, spans_within
from minidist.device.backend import Array
from minidist.parallel.step.replicas import sharers
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.strategy import Strategy

WORKER, SERVER, PRIVATE = KINDS = ("worker", "server", "scheme")


class StateEntry(NamedTuple):
    """An array of the state: `part` of a parameter's flat numbers, or (None) a private array;
    `adds`: loaded numbers are added to it."""

    kind: str
    parameter: Parameter | None
    part: range
    array: Array
    adds: bool = False


def is_schemes(key: str) -> bool:
    """Return whether a checkpoint's key, "kind/name", belongs to a scheme."""
    return key.partition(".")[0] in KINDS


def own_entries(strategy: Strategy) -> list[StateEntry]:
    """Return the entries that this rank has."""
    scheme = strategy.data_axis.scheme
    if scheme is None:
        return []
    found = [
        StateEntry(f"{base}.{number}", parameter, part, array)
        for base, number, _, parameter, part, array in _errors(strategy, scheme)
    ]
    return found + [
        StateEntry(
            f"{PRIVATE}.{_world_rank(scheme)}.{key}", None, range(array.size), array.reshape(-1)
        )
        for key, array in sorted(scheme.private.items())
    ]


def wanted_entries(
    strategy: Strategy, saved: dict[str, Any], names: dict[Parameter, str]
) -> list[StateEntry]:
    """Return the entries that this rank loads of a saved state. Set its errors to zero first,
    unless it loads its own again.

    Args:    saved: the small state; names: of parameters, whole.
    """
    scheme = strategy.data_axis.scheme
    told = saved.get("scheme")
    if scheme is None:
        return []
    if told and same_layout(scheme, told):
        return own_entries(strategy)
    for error in scheme.errors.values():
        error[...] = 0
    wanted = list[StateEntry]()
    seen = set[Parameter]()
    for base, number, count, parameter, part, array in _errors(strategy, scheme):
        # the first has all of the parameter
        if not told or not base.startswith(WORKER) or parameter in seen:
            continue
        seen.add(parameter)
        kinds = [
            f"{kind}.{each}"
            for kind, many in sorted(told["owed"].get(names[parameter], {}).items())
            for each in range(many)
        ]
        wanted += [
            StateEntry(kind, parameter, part, array, adds=True) for kind in kinds[number::count]
        ]
    return wanted


def described(strategy: Strategy, names: dict[Parameter, str]) -> dict[str, Any]:
    """Return this rank's state that is not in arrays, as JSON: the scheme, its counters, the number
    of ranks with errors of each parameter."""
    scheme = strategy.data_axis.scheme
    if scheme is None or scheme.name == "none":
        return {}
    owed: dict[str, dict[str, int]] = {}
    for base, _, count, parameter, _, _ in _errors(strategy, scheme):
        owed.setdefault(names[parameter], {})[base] = count
    return {
        "name": scheme.name,
        "counters": dict(scheme.counters),
        "owed": owed,
        "layout": {str(_world_rank(scheme)): layout_of(scheme)},
    }


def take_counters(strategy: Strategy, told: dict[str, Any]) -> str:
    """Load counters of a `described` scheme. Returns: a sentence on what is left out; "" if nothing
    is."""
    scheme = strategy.data_axis.scheme
    if not told:
        return ""
    if scheme is not None and scheme.name != "none":
        shared = told["counters"].keys() if told["name"] == scheme.name else {"steps", "scale"}
        scheme.counters.update({key: told["counters"][key] for key in shared})
    if told["owed"] and (scheme is None or not scheme.errors):
        return (
            f"what compress={told['name']} has not sent yet is left out: this plan keeps "
            "no residuals"
        )
    if scheme is not None and scheme.private and not same_layout(scheme, told):
        return (
            f"compress={told['name']} begins anew under this plan; what it has not sent yet goes on"
        )
    return ""


def same_layout(scheme: Scheme, told: dict[str, Any]) -> bool:
    """Return whether this rank had the same part in the plan that was saved."""
    return bool(scheme.runs) and told["layout"].get(str(_world_rank(scheme))) == layout_of(scheme)


def layout_of(scheme: Scheme) -> str:
    """Return a digest of the scheme and of all that it sums."""
    runs = [
        (
            run.verb,
            run.group.world_ranks,
            [(p.name, p.shape, part.start, part.stop) for p, part in run.spans],
        )
        for run in scheme.runs
    ]
    return hashlib.blake2b(repr((scheme.name, runs)).encode(), digest_size=8).hexdigest()


def _world_rank(scheme: Scheme) -> int:
    return scheme.runs[0].group.world_rank


def _errors(
    strategy: Strategy, scheme: Scheme
) -> Iterator[tuple[str, int, int, Parameter, range, Array]]:
    """Yield (kind without number, number, count of numbers, parameter, its part, the flat array) of
    each error not sent yet."""
    axis: Any = strategy.data_axis
    for (which, index), error in sorted(
        scheme.errors.items(), key=lambda item: (item[0][0] != WORKER, item[0][1])
    ):
        run = scheme.runs[index]
        start = 0
        spans = run.spans
        if which == SERVER:
            chunk = slice(*bounds(run.size, run.group.size)[run.group.rank : run.group.rank + 2])
            spans = tuple(
                (parameter, part) for parameter, _, part in spans_within(run.spans, chunk)
            )
        for parameter, part in spans:
            group = run.group if run.verb == "all_reduce" else sharers([parameter], axis.group)
            summand, count = strategy.summand_of(parameter)
            number, ranks = (group.rank, group.size) if which == WORKER else (0, 1)
            if len(part):
                yield (
                    f"{which}.{run.verb}",
                    number * count + summand,
                    ranks * count,
                    parameter,
                    part,
                    error[start : start + len(part)],
                )
            start += len(part)
