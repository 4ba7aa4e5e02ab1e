"""What trains is what is taught: a Trainer's step enters the classes that each chapter shows."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from training import global_batch, tiny

import minidist as md
from minidist import lessons
from minidist.parallel.hybrid.hybrid import Plan, Trainer

PACKAGE = Path(md.__file__).parent

Case = tuple[dict[str, Any], dict[str, Any], set[str]]
"""The plan that a chapter teaches, changes of the model, and the chapter's classes."""

TAUGHT: dict[str, list[Case]] = {
    "00": [({}, {}, {"Single"})],
    "05": [({"strategy": "data-parallel", "replicas": 2}, {}, {"DataParallel"})],
    "06": [({"dp": 2, "strategy": "parameter-server"}, {}, {"ParameterServer"})],
    "07": [({"dp": 2}, {}, {"DDP"})],
    "09": [({"precision": "bf16"}, {"dtype": "float32"}, {"MixedPrecision"})],
    "10": [({"pp": 2, "schedule": "naive"}, {}, {"ModelParallel"})],
    "11": [
        ({"pp": 2}, {}, {"Pipeline", "Executor"}),
        ({"pp": 2, "schedule": "pipedream"}, {}, {"StashingPass"}),
    ],
    "12": [({"tp": 2}, {}, {"TensorRegion", "ColumnLinear", "RowLinear"})],
    "13": [
        ({"tp": 2, "sequence_parallel": True}, {}, {"SequenceRegion"}),
        ({"cp": 2}, {}, {"RingSelfAttention"}),
        ({"cp": 2}, {"attention_pattern": "local:64"}, {"SparseRingSelfAttention"}),
        ({"cp": 2, "attention": "all-to-all"}, {}, {"UlyssesSelfAttention"}),
    ],
    "14": [({"dp": 2, "zero": 1}, {}, {"Zero1"})],
    "15": [({"dp": 2, "zero": 2}, {}, {"Zero2"})],
    "16": [({"dp": 2, "zero": 3}, {}, {"Zero3"})],
    "17": [({"dp": 2, "pp": 2, "tp": 2}, {}, {"Trainer", "Hybrid"})],
    "18": [({"ep": 2}, {"mixture": md.nn.MixtureConfig(experts=4)}, {"SplitExperts"})],
    "20": [
        ({"dp": 2, "zero": 1, "offload": "optimizer"}, {}, {"OnHost", "ShardStore"}),
        ({"dp": 2, "zero": 3, "offload": "all"}, {}, {"OnDisk"}),
    ],
    "21": [({"dp": 2, "local_steps": 1}, {}, {"LocalSteps"})],
}
"""By chapter. 08 and 19 have no class: their real versions are options of every step's loop and of a
block; 22 to 26 are not strategies."""


def qualified(frame: FrameType) -> str:
    """Return the class and name of a frame's function; Python 3.10 does not keep the class."""
    code = frame.f_code
    if sys.version_info >= (3, 11):
        return code.co_qualname
    for cls in type(frame.f_locals.get("self")).__mro__:
        if getattr(vars(cls).get(code.co_name), "__code__", None) is code:
            return cls.__name__
    return code.co_name


def entered(plan: dict[str, Any], changes: dict[str, Any]) -> set[tuple[str, str]]:
    """(module, class) of the methods that rank 0's second step enters, in its own thread."""

    def job(world: Any) -> set[tuple[str, str]]:
        config = tiny(layers=2, **changes)
        clip = None if plan.get("schedule") == "pipedream" else 1.0
        trainer = Trainer(Plan(**plan), config, world, clip=clip)
        trainer.step(global_batch(0, 4, config))
        seen = set()
        codes = set()

        def look(frame: FrameType, event: str, _: Any) -> None:
            if event != "call" or frame.f_code in codes:
                return
            if sys.version_info >= (3, 11):  # one code has one class
                codes.add(frame.f_code)
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                name = qualified(frame).split(".")[0]
                seen.add((f"minidist/{path.relative_to(PACKAGE).as_posix()}", name))

        sys.setprofile(look)
        try:
            trainer.step(global_batch(1, 4, config))
        finally:
            sys.setprofile(None)
        trainer.close()
        return seen

    return md.run(job, size=Plan(**plan).size)[0]


@pytest.mark.parametrize("number", TAUGHT)
def test_a_step_enters_the_classes_of_its_chapter(number: str) -> None:
    modules = lessons.find(number).modules
    for plan, changes, classes in TAUGHT[number]:
        seen = {name for module, name in entered(plan, changes) if module in modules}
        assert classes <= seen, (plan, modules)


def test_a_trainer_divides_by_the_classes_of_12_and_13() -> None:
    """They divide the model when they are made; a step then enters their layers."""

    def job(world: Any) -> list[str]:
        trainer = Trainer(Plan(tp=2, cp=2), tiny(layers=2), world)
        strategy: Any = trainer.strategy
        names = [type(axis).__name__ for axis in strategy.axes]
        trainer.close()
        return names

    assert md.run(job, size=4)[0] == ["TensorParallel", "ContextParallel"]
