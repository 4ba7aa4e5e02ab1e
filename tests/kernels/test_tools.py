"""Compilers speak the language in which their errors are looked for."""

import pytest

from minidist.kernels import tools


def test_a_tool_speaks_english_and_any_byte_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    done = tools.run(["sh", "-c", r"echo $LC_ALL; printf '\377 \342\200\246'; exit 3"])
    assert (done.returncode, done.stdout) == (3, "C\n\ufffd …")
