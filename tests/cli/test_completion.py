"""The completion script: bash reads it and completes commands, options, choices, lessons, files."""

import subprocess
from pathlib import Path

import pytest

from minidist.cli import COMMANDS
from minidist.cli.completion import SHELLS, script

ASK = """
source {script}
COMP_WORDS=({words} "{begun}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}"
_shtab_minidist
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(folder: Path, words: str, begun: str) -> list[str]:
    """Return what bash offers for a line of which the last word has only begun."""
    file = folder / "minidist.bash"
    file.write_text(script("bash"))
    ask = ASK.format(script=file, words=words, begun=begun)
    answer = subprocess.run(
        ["bash", "-c", ask], cwd=folder, capture_output=True, text=True, timeout=30
    )
    return answer.stdout.split()


@pytest.mark.parametrize(
    "words, begun, offered",
    [
        ("minidist", "de", ["demo"]),
        ("minidist train", "--precis", ["--precision"]),
        ("minidist train --precision", "", ["fp32", "bf16", "fp16", "fp8"]),
        ("minidist lesson", "2", ["20", "21", "22", "23", "24", "25", "26"]),
        ("minidist bench", "all-r", ["all-reduce"]),
        ("minidist check 03", "my", ["my_answer.py"]),
    ],
)
def test_bash_completes(tmp_path: Path, words: str, begun: str, offered: list[str]) -> None:
    (tmp_path / "my_answer.py").touch()
    assert completed(tmp_path, words, begun) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command(shell: str) -> None:
    text = script(shell)
    assert [name for name in COMMANDS if name not in text] == []
