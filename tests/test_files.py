"""Files are whole or not there, also after a kill and on a full disk; what killed processes left
goes."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minidist import files
from minidist.errors import ConfigError
from minidist.files import (
    DRAFTS,
    add_line,
    begin,
    check_writable,
    create,
    home,
    lock_holder,
    read_regular,
    scratch,
    sweep,
    user_folder,
    whole,
)
from minidist.lessons.figures import save_mermaid
from minidist.lessons.running import insert_mermaid

LONG = "x" * 300


def killed(body: Callable[[], object]) -> None:
    """Run `body` in a copy of this process, which must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def die(*given: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file may be longer than 4 KiB: writing more fails, as on a full disk."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    with whole(file) as draft:
        draft.write_text("new")
        assert file.read_text() == "old" and draft.name == file.name
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["result.json"]


def test_what_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, small_files: None) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    with pytest.raises(OSError, match="File too large") as caught, whole(file) as draft:
        draft.write_bytes(bytes(5000))
    assert caught.value.filename == str(file)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["result.json"]


def test_a_link_stays_one_and_a_pipe_is_written_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole(tmp_path / "link") as draft:
        draft.write_text("through")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "through"
    with whole("/dev/null") as draft:
        assert draft == Path("/dev/null")


def test_a_pipe_that_is_open_already_is_written_to() -> None:
    """/dev/stdout before `| cat` and `>(cat)` are such pipes: the real path, pipe:[123], does not
    exist."""
    reader, writer = os.pipe()
    file = f"/dev/fd/{writer}"
    check_writable("--json", file)
    with whole(file) as draft:
        draft.write_bytes(b"written")
    os.close(writer)
    assert os.read(reader, 100) == b"written"
    os.close(reader)


def test_what_a_killed_process_leaves_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    def leave() -> None:
        with scratch(tmp_path, "minidist-run-") as folder:
            (folder / "task").write_text("half")
            die()

    killed(leave)
    assert len(os.listdir(tmp_path)) == 1
    with scratch(tmp_path, "minidist-run-") as folder:
        assert os.listdir(tmp_path) == [folder.name]
        with scratch(tmp_path, "minidist-run-") as other:
            assert sorted(os.listdir(tmp_path)) == sorted([folder.name, other.name])
        sweep(tmp_path, "minidist-run-")
        assert folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_a_folder_of_the_same_prefix_that_is_not_locked_goes_and_others_stay(
    tmp_path: Path,
) -> None:
    for name in (f"{DRAFTS}old", "mine"):
        (tmp_path / name).mkdir()
    with scratch(tmp_path):
        assert (tmp_path / "mine").is_dir() and not (tmp_path / f"{DRAFTS}old").exists()


def test_a_folder_that_a_sweep_locks_first_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in 800 ranks that write into one folder at once lost its draft in this way."""
    made = tempfile.mkdtemp
    swept = list[tuple[str, int]]()

    def make(**options: str) -> str:
        folder = made(**options)
        if not swept:
            swept.append((folder, os.open(folder, os.O_RDONLY)))
            fcntl.flock(swept[0][1], fcntl.LOCK_EX)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with whole(tmp_path / "result.json") as draft:
        ((folder, lock),) = swept
        shutil.rmtree(folder)
        os.close(lock)
        draft.write_text("whole")
    assert (tmp_path / "result.json").read_text() == "whole" and os.listdir(tmp_path) == [
        "result.json"
    ]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (LONG, "File name too long"),
        ("nowhere/x", "there is no folder"),
        ("/proc/x", "No such file"),
        (".", "is a folder"),
        (f"{LONG}/x", "there is no folder"),
    ],
)
def test_a_place_that_cannot_be_written(
    file: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^--json .*{problem}"):
        check_writable("--json", file)
    assert os.listdir(tmp_path) == []


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    for file in (tmp_path / "new", tmp_path / "there", "/dev/null", None):
        check_writable("--json", file)
    assert os.listdir(tmp_path) == ["there"] and (tmp_path / "there").read_text() == "old"


@pytest.mark.parametrize(
    "write", [lambda file, text: save_mermaid(text, file.parent), insert_mermaid]
)
def test_a_lessons_diagram_is_the_old_one_until_the_new_one_is_whole(
    write: Callable[[Path, str], None], tmp_path: Path, small_files: None
) -> None:
    file = tmp_path / "figure.mmd"
    file.write_text("```mermaid\nold```")
    with pytest.raises((OSError, ConfigError), match="File too large"):
        write(file, "x" * 5000)
    assert file.read_text() == "```mermaid\nold```" and os.listdir(tmp_path) == ["figure.mmd"]


@pytest.mark.parametrize("refuses", [None, errno.EOPNOTSUPP, "missing"])
@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 3])
def test_room_is_reserved_where_the_system_cannot(
    refuses: int | str | None, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no posix_fallocate; some file systems do not know it. What is there stays."""
    if refuses == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    elif refuses:
        monkeypatch.setattr(
            os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(refuses, "no"))
        )
    file = tmp_path / "region"
    file.write_bytes(b"abc")
    with open(file, "r+b") as stream:
        files.reserve(stream.fileno(), 3, nbytes)
    assert file.read_bytes() == b"abc" + bytes(nbytes)


def test_a_full_disk_is_told_when_room_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    with open(tmp_path / "region", "w+b") as stream, pytest.raises(OSError, match="full"):
        files.reserve(stream.fileno(), 0, 8)


def test_who_has_locked_a_folder(tmp_path: Path) -> None:
    mine, theirs = (os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    assert lock_holder(theirs) is None
    fcntl.flock(mine, fcntl.LOCK_EX)
    assert lock_holder(theirs) == lock_holder(mine) == os.getpid()
    os.close(mine)
    assert lock_holder(theirs) is None
    os.close(theirs)


# --- a user without a home
# -------------------------------------------------------------------------------------------

NO_USERS = (
    "import pwd\ndef getpwuid(uid):\n    raise KeyError(f'uid not found: "
    "{uid}')\npwd.getpwuid = getpwuid\n"
)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files of a user without HOME and without an entry in the list of
    users."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_gets_a_private_folder(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = homeless / f"minidist-home-{os.geteuid()}"
    assert home() == home() == folder and folder.stat().st_mode & 0o777 == 0o700
    assert user_folder("XDG_CACHE_HOME", ".cache") == folder / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder("XDG_CACHE_HOME", ".cache") == folder / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/cache")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home() == Path("/home/somebody")


@pytest.mark.parametrize("planted", ["open to others", "a link", "a file", "nowhere"])
def test_a_folder_that_others_may_have_planted_is_no_home(
    planted: str, homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = homeless / f"minidist-home-{os.geteuid()}"
    if planted == "open to others":
        folder.mkdir()
        folder.chmod(0o755)
    elif planted == "a link":
        folder.symlink_to("/")
    elif planted == "a file":
        folder.touch(mode=0o600)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(homeless / "nowhere"))
    with pytest.raises(
        ConfigError, match="this user has no home folder, and .*; set HOME"
    ) as caught:
        home()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "minidist", "doctor", "--help"],
        ["-m", "minidist", "bench", "calibrate", "--help"],
        [
            "-m",
            "minidist",
            "train",
            "--layers=1",
            "--width=16",
            "--heads=2",
            "--batch=4",
            "--context=8",
            "--steps=1",
            "--data=book.txt",
            "--quiet",
            "--out=run",
        ],
        [
            "-c",
            "import minidist as md; assert md.init().size == 1; "
            "assert md.run(lambda world: world.size, size=1, transport='tcp') == [1]",
        ],
    ],
    ids=["doctor", "bench", "train", "init"],
)
def test_commands_of_a_user_without_a_home(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(NO_USERS)
    (tmp_path / "book.txt").write_text("a text of a few words, again and again. " * 60)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "PYTHONPATH": str(tmp_path / "start"), "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------- files that another user may have put there

OTHERS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a socket": lambda file: socket_at(file),
    "loop": lambda file: file.symlink_to(file.name),
}


def socket_at(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(file))


@pytest.mark.parametrize("what", sorted(OTHERS))
def test_only_a_regular_file_is_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is waited for: a pipe has no writer here."""
    monkeypatch.chdir(tmp_path)
    file = Path("file")
    OTHERS[what](file)
    with pytest.raises(
        OSError, match="Too many levels" if what == "loop" else f"is {what}; a regular file"
    ):
        read_regular(file, most=100)
    with pytest.raises(OSError, match="link" if file.is_symlink() else what):
        read_regular(file, most=100, member=True)


def test_a_link_is_followed_where_the_user_names_it_and_not_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"text")
    (tmp_path / "link").symlink_to("there")
    assert read_regular(tmp_path / "link", most=4) == b"text"
    with pytest.raises(OSError, match="is a link, which is not followed here"):
        read_regular(tmp_path / "link", most=4, member=True)


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    """Nor is memory taken for it: the file has a tebibyte of holes."""
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(OSError, match="has more than 1,000 bytes"):
        read_regular(tmp_path / "sparse", most=1000)
    # of 0 bytes, as the system says
    assert b"Name:" in read_regular("/proc/self/status", most=100_000)


def test_what_lies_in_a_members_place_is_replaced_and_not_written_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    for write in (lambda file: os.close(begin(file)), whole_member):
        file = tmp_path / "member"
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        write(file)
        assert target.read_text() == "precious" and file.is_file() and not file.is_symlink()
    file.unlink()
    file.symlink_to(target)
    for refuse in (lambda: add_line(file, "x"), lambda: create(file)):
        with pytest.raises(OSError):
            refuse()
    assert target.read_text() == "precious"


def whole_member(file: Path) -> None:
    with whole(file, member=True) as draft:
        draft.write_text("new")


def test_a_new_file_is_this_users_alone(tmp_path: Path) -> None:
    os.close(create(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
