"""The meaning of each option of a Plan, for help(minidist.Plan) and for the command line.

zero: int = option(0, "divide among ranks: 1 the optimizer's state, …", choices=ZERO_STAGES)
"""

import textwrap
from dataclasses import Field, field, fields
from typing import Any, NamedTuple

WIDTH = 100


class PlanOption(NamedTuple):
    """The meaning of one field of a Plan.

    Attributes: help: other options stand in braces: "{zero} 3" is "--zero 3" on the command line.
                choices: the words that it takes, if it takes only some.
                metavar: what stands for its value; kind: how the command line reads it (a key of
                KINDS in cli/train/arguments.py; "": a word).
                otherwise: the meaning of its default, where the default itself does not say it.
                needs: the condition under which it can be given, a key of NEEDS in plan_checks.py; "":
                nothing.
    """

    help: str
    choices: tuple[Any, ...] = ()
    metavar: str | None = None
    kind: str = ""
    otherwise: str | None = None
    needs: str = ""


def option(default: Any, help: str, **about: Any) -> Any:
    """Return a field of a dataclass with its default and its PlanOption. Args: about: as PlanOption."""
    return field(default=default, metadata={"option": PlanOption(help, **about)})


def options_of(plan: Any) -> dict[str, tuple[Field[Any], PlanOption]]:
    """Return the fields of Plan that have a PlanOption, by name, in their order."""
    return {
        each.name: (each, each.metadata["option"])
        for each in fields(plan)
        if "option" in each.metadata
    }


def described(plan: Any) -> str:
    """Return the entries of Plan's docstring that its options make."""
    lines = []
    for name, (each, about) in options_of(plan).items():
        text = about.help
        if about.choices:
            text += f"; one of {', '.join(map(str, about.choices))}"
        text += f" (default: {about.otherwise or repr(each.default)})"
        lines += textwrap.wrap(
            f"{name}: {text.replace('{', '').replace('}', '')}",
            WIDTH,
            initial_indent=" " * 12,
            subsequent_indent=" " * 16,
        )
    return "\n".join(lines)
