"""The page of errors has each error once, as the classes are."""

import inspect

from minidist import errors
from minidist.reference.errors import error_entries


def test_every_error_is_in_the_tree_once_and_says_when() -> None:
    entries = error_entries()
    names = [each.name for each in entries]
    classes = {
        name
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.MinidistError)
    }
    assert len(names) == len(set(names))
    assert set(names) == classes - {"MinidistError"}
    assert all(each.when and "│" not in each.when for each in entries)


def test_a_description_of_two_lines_is_whole() -> None:
    (mismatch,) = (each for each in error_entries() if each.name == "MismatchError")
    assert mismatch.when.startswith("calls that do not fit together")
    assert mismatch.when.endswith("and are not")
    assert mismatch.bases == ("CommError",)
