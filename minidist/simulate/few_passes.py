"""Chapter 24 · Seconds of a step of many passes, from two steps of few.

    predicted = FewPasses()
    predicted(run, profile)             # as Predictor, but 512 microbatches cost what 20 cost

Once a pipeline is full, as many further microbatches as it has ranks make the step longer by the
same time; so does each further pass of accumulated gradients:

    seconds                     ●  what is asked for: on the line
          │              .·'
          │         .·'
          │    ●'   simulated: as many passes more as there are ranks in the pipeline
          │ ●       simulated: the fewest passes that fill it
          └──────────────────── passes

It is no approximation: a simulated clock has no noise (tests/simulate/test_few_passes.py).

Source: Narayanan et al. 2021, §2.2.1 (time of a pipeline by its microbatches).
"""

from collections.abc import Callable
from dataclasses import replace

from minidist.simulate.calibrate import Predictor
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import CostProfile
from minidist.simulate.runs import Run
from minidist.simulate.trace import RankTrace


class FewPasses:
    """Seconds of runs by the simulator, which makes only a few passes of a step. Args: traces: as
    simulate's."""

    def __init__(self, traces: Callable[..., RankTrace] = run_rank) -> None:
        self._predicted = Predictor(traces)

    def __call__(self, run: Run, profile: CostProfile) -> float:
        passes = run.plan.pieces * run.plan.accumulate
        few, period = fewest(run)
        if passes <= few + period or run.batch % passes:
            return self._predicted(run, profile)
        first = self._predicted(of_passes(run, few), profile)
        second = self._predicted(of_passes(run, few + period), profile)
        return second + (second - first) * (passes - few - period) / period


def fewest(run: Run) -> tuple[int, int]:
    """Return the fewest passes that are simulated of a run, and after how many more a pipeline is
    where it was. Interleaved stages are full a round later."""
    plan = run.plan
    if plan.pp == 1:
        return 1, 1
    rounds = 2 if plan.schedule == "interleaved" else 1
    return rounds * plan.pp + plan.pieces * plan.accumulate % plan.pp, plan.pp


def of_passes(run: Run, count: int) -> Run:
    """Return the run with `count` passes of the same size, and a batch for these passes."""
    passes = run.plan.pieces * run.plan.accumulate
    plan = (
        replace(run.plan, microbatches=count, accumulate=1)
        if run.plan.pp > 1
        else replace(run.plan, accumulate=count)
    )
    return run._replace(plan=plan, batch=run.batch * count // passes)
