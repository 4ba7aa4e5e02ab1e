"""Every public function tells its arguments, its result and its errors: what `help()` shows is
enough to call it.

Public is what a user reaches from `dir(minidist)`: its functions, and the methods of its classes,
of the Group that `md.init` returns and of the Pending that a `start_…` method of Group returns. A
Group and a Pending are not made by users, so their constructors are left out. "as broadcast" in a
section stands for that section of broadcast.
"""

import inspect
import re

import pytest

import minidist as md
from minidist.comm.group import Group, Pending
from minidist.simulate.simulate import simulate

MADE = (md.Mesh, md.Plan, md.Trainer)
STRATEGIES = (md.DDP, md.Zero1, md.Zero2, md.Zero3, md.Pipeline)
FUNCTIONS = {"init": md.init, "run": md.run, "plan_for": md.plan_for, "simulate": simulate}
RAISES_NOTHING = {"Plan.as_dict", "Plan.updates", "Pending.done", "Group.tell_step"}
SECTION = re.compile(
    r"(?:^|[.)]) *(Args, Raises|Args|Attributes|Returns|Raises|Cost|Rounding):", re.MULTILINE
)


def methods(cls):
    """{"Class.name": function} of the public methods; properties apart."""
    found = {}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not name.startswith("_") and inspect.isfunction(function):
            found[f"{cls.__name__}.{name}"] = function
    return found


PUBLIC = FUNCTIONS | {
    name: function for cls in (*MADE, Group, Pending) for name, function in methods(cls).items()
}


def sections(doc):
    """{"Args": its text, ...} of a docstring; "Args, Raises: as broadcast" is both."""
    marks = [*SECTION.finditer(doc), None]
    return {
        name: doc[mark.end() : following and following.start()]
        for mark, following in zip(marks, marks[1:], strict=False)
        for name in mark[1].split(", ")
    }


def parameters(name, function):
    """Names of the parameters, without self or cls."""
    return [*inspect.signature(function).parameters][name not in FUNCTIONS :]


def complaints(name, function, public=PUBLIC):
    """What the docstring of a public function leaves out."""
    told = sections(inspect.getdoc(function) or "")
    arguments = told.get("Args", "")
    if twin := re.match(r"\s*as (\w+)", arguments):
        other = f"{name.rpartition('.')[0]}.{twin[1]}"
        if parameters(other, public[other]) != parameters(name, function):
            yield f"{name}: its arguments are not those of {twin[1]}"
        arguments = sections(inspect.getdoc(public[other]) or "").get("Args", "")
    for parameter in parameters(name, function):
        if not re.search(rf"\b{parameter}\b", arguments):
            yield f"{name}: no entry for {parameter} in Args"
    if (
        inspect.signature(function).return_annotation not in (None, "None")
        and "Returns" not in told
    ):
        yield f"{name}: no Returns"
    if ("Raises" in told) == (name in RAISES_NOTHING):
        yield (
            f"{name}: {'Raises, and is said to raise nothing' if 'Raises' in told else 'no Raises'}"
        )


def test_every_public_function_tells_its_arguments_result_and_errors():
    names = {*FUNCTIONS, *(cls.__name__ for cls in (*MADE, *STRATEGIES, Group, md.Tensor))}
    names |= {"errors", "nn", "ops", "optim"}
    assert len(PUBLIC) > 50 and set(md.__all__) == names
    wrong = [line for name, function in PUBLIC.items() for line in complaints(name, function)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cls", [*MADE, *STRATEGIES])
def test_every_argument_of_a_class_is_told(cls):
    told = sections(inspect.getdoc(cls) or "")
    arguments = told.get("Args", "") + told.get("Attributes", "")
    assert [
        name
        for name in inspect.signature(cls).parameters
        if not re.search(rf"\b{name}\b", arguments)
    ] == []
    assert "Raises" in told


@pytest.mark.parametrize("cls", [*MADE, Group])
def test_every_property_has_a_docstring(cls):
    assert [
        name
        for name in dir(cls)
        if isinstance(inspect.getattr_static(cls, name), property)
        and not name.startswith("_")
        and not inspect.getdoc(getattr(cls, name))
    ] == []


def test_what_is_left_out_is_named():
    def verb(self, x, root):
        """A verb.

        Args:    x (...): an array.
        """
        return x

    verb.__annotations__["return"] = int

    def start_verb(self, x):
        """Start verb. Args: as verb. Raises: as verb."""

    start_verb.__annotations__["return"] = None
    public = {"Group.verb": verb, "Group.start_verb": start_verb}
    assert [*complaints("Group.verb", verb, public)] == [
        "Group.verb: no entry for root in Args",
        "Group.verb: no Returns",
        "Group.verb: no Raises",
    ]
    assert [*complaints("Group.start_verb", start_verb, public)] == [
        "Group.start_verb: its arguments are not those of verb"
    ]
