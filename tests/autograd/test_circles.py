"""No two modules of autograd import each other, not even in a circle of several."""

from imports import imports, modules

ROOM = "minidist.autograd"


def test_imports_form_no_circle() -> None:
    room = [name for name in modules() if name == ROOM or name.startswith(f"{ROOM}.")]
    left = {name: {found.imported for found in imports(name)} & set(room) - {name} for name in room}
    assert len(left) > 20
    while left:
        done = [name for name, needed in left.items() if not needed & left.keys()]
        assert done, "a circle: " + ", ".join(
            f"{name} imports {sorted(needed & left.keys())}" for name, needed in left.items()
        )
        for name in done:
            del left[name]
