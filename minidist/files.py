"""Files that are whole or not there: drafts that take their place at once, and folders that outlive
no process.

    with whole("result.json") as draft:      # a reader finds the old file or the new one, also
        draft.write_text(...)                # after a kill
    with scratch() as folder:                # a folder that exists only inside the block
        ...
    read_regular("notes.txt", most=1 << 20)  # never waits: a pipe, a device or a folder is an OSError
    create(folder / "00003.ring")            # a new private file; never through an existing link

A killed process leaves its scratch folders behind. The process held a lock on each folder, and the
system has released it. So the next process that makes or sweeps such a folder sees that they are
stale, and removes them.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from minidist.errors import ConfigError

DRAFTS = ".minidist-"  # how the names of folders of drafts begin
PIECE = 1 << 20  # bytes of zeros that are written at once
# the code of errors for something that exists, but is no file to read or append to
NOT_REGULAR = errno.EINVAL
PRIVATE = 0o600
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # not the user's mistake


def user_folder(variable: str, below: str) -> Path:
    """Return the user's folder that an XDG variable names, or else the folder `below` in the home
    folder.

    Raises: ConfigError for a user without a home, where no private folder can be made either.
    """
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else home() / below


def home() -> Path:
    """Return the user's home folder.

    A container may run as a user without HOME and without an entry in the list of users. Such a
    user gets a folder among the temporary files, which no other user can read or write.
    Raises: ConfigError if that cannot be.
    """
    with suppress(RuntimeError, KeyError):
        if (found := Path.home()).is_absolute():
            return found
    try:
        folder = Path(tempfile.gettempdir()) / f"minidist-home-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()
        problem = "" if stat.S_ISDIR(state.st_mode) else "is not a folder"
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            problem = "is not private to this user"
    except OSError as error:
        folder = Path(error.filename or tempfile.gettempprefix())
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"this user has no home folder, and {folder} cannot be used instead: {problem}; set "
            "HOME"
        )
    return folder


# ------------------------------------------------------------------------------------------ reading


def open_regular(
    file: str | Path, *, member: bool = False, flags: int = os.O_RDONLY, mode: int = 0o666
) -> int:
    """Return a descriptor of a regular file; never wait for a writer, and never start a device.

    Args:    member: the file belongs to a folder that another user may have filled, so it may not
             be a link.
             flags, mode: as of os.open.
    Raises:  OSError whose strerror says what is there instead.
    """
    try:
        _require_regular(os.lstat(file) if member else os.stat(file), file)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    no_wait = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    opened = os.open(file, flags | no_wait | (os.O_NOFOLLOW if member else 0), mode)
    try:
        _require_regular(os.fstat(opened), file)  # what lies there may have changed since
    except OSError:
        os.close(opened)
        raise
    return opened


def read_regular(file: str | Path, *, most: int, member: bool = False) -> bytes:
    """Return the bytes of a regular file. Args, Raises: as open_regular; OSError too for more than
    `most` bytes."""
    with open(open_regular(file, member=member), "rb") as stream:
        return read_rest(stream, most)


def read_file_or_pipe(file: str | Path, *, most: int) -> bytes:
    """Return the content of a user's file. A pipe that is open already (/dev/stdin, `<(…)`) is read
    to its end.

    Raises: OSError, with the name: also for a folder, a named pipe, a device, and a file of more
    than `most` bytes.
    """
    is_open_pipe = stat.S_ISFIFO(os.stat(file).st_mode) and os.path.realpath(file).startswith(
        "/proc/"
    )
    if not is_open_pipe:
        return read_regular(file, most=most)
    with open(file, "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(NOT_REGULAR, f"holds more than {most:,} bytes", str(file))
    return content


def read_rest(stream: BinaryIO, most: int) -> bytes:
    """Return the bytes from here to the end of a regular file. Raises: OSError for more than
    `most`, before a read."""
    rest = os.fstat(stream.fileno()).st_size - stream.tell()
    pieces = [b""]
    total = 0
    while rest <= most and total <= most:
        # it may grow, or its system does not know its size
        pieces.append(stream.read(max(rest - total, PIECE)))
        total += len(pieces[-1])
        if not pieces[-1]:
            return b"".join(pieces)
    raise OSError(
        NOT_REGULAR,
        f"has more than {most:,} bytes, the limit for such a file",
        stream.name,
    )


def _require_regular(found: os.stat_result, file: str | Path) -> None:
    """Raise OSError unless it is a regular file."""
    if stat.S_ISREG(found.st_mode):
        return
    kinds = {
        stat.S_IFLNK: "a link, which is not followed here",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    what = kinds.get(stat.S_IFMT(found.st_mode), "no file")
    raise OSError(NOT_REGULAR, f"is {what}; a regular file is needed", str(file))


def create(file: str | Path, *, mode: int = PRIVATE, flags: int = os.O_RDWR) -> int:
    """Return a descriptor of a new file.

    Raises:  FileExistsError if something has the name: a file, a link, also one that leads nowhere.
             OSError.
    """
    return os.open(file, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def begin(file: str | Path) -> int:
    """Return a descriptor to append to a new, empty file; if the name is taken by something else
    than a regular file, remove that first.

    Raises:  OSError.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(file).st_mode):
            os.unlink(file)
    return open_regular(file, member=True, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)


def add_line(file: str | Path, line: str) -> None:
    """Append a line to a file of a run folder, and make the file if it is not there. Raises:
    OSError."""
    with open(
        open_regular(file, member=True, flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab"
    ) as stream:
        stream.write(f"{line}\n".encode())


def make_member_folder(folder: Path) -> None:
    """Make a folder of a run folder, unless it is there. Raises: OSError, also if a link has its
    name."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(
            NOT_REGULAR, "is a link, which is not followed here; a folder is needed", str(folder)
        )


def private(file: str, flags: int) -> int:
    """Open a file as `open` would; a new file is readable only for this user."""
    return os.open(file, flags, PRIVATE)


# ------------------------------------------------------------------------------------------ writing


@contextmanager
def scratch(parent: str | Path | None = None, prefix: str = DRAFTS) -> Iterator[Path]:
    """Context manager: a new private folder in `parent` (None: the system's for temporary files),
    removed at the end.

    Stale folders are removed first. Raises: OSError if it cannot be made.
    """
    home = Path(tempfile.gettempdir() if parent is None else parent)
    sweep(home, prefix)
    folder, lock = _locked_folder(home, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(home: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock; made again if a sweep was faster
    than the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            if _locked(lock) and folder.exists():
                return folder, lock
            os.close(lock)


def _locked(file: int) -> bool:
    """Lock a new folder; False if a sweep holds the lock, which is about to remove the folder."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: then nothing is swept there
        return not isinstance(error, BlockingIOError)
    return True


def sweep(home: Path, prefix: str = DRAFTS, *, older: float = 0.0) -> None:
    """Remove the scratch folders in `home` that killed processes left, and other files that their
    owners lock.

    Args:    older: spare files that were changed within this number of seconds.
    """
    for stale in home.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or gone
            lock = os.open(stale, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stale.is_dir():
                    shutil.rmtree(stale, ignore_errors=True)
                elif time.time() - stale.stat().st_mtime >= older:
                    stale.unlink()
            finally:
                os.close(lock)


@contextmanager
def whole(file: str | Path, *, member: bool = False) -> Iterator[Path]:
    """Context manager: a draft of `file`, of the same name; it takes the place of `file` at the end
    of the block, or is removed if that fails.

    Something that is no regular file (a pipe, /dev/stdout), or a file in a folder that takes no
    new files, is written in place.
    Args:    member: the file belongs to a folder that another user may have filled: a link, or
             anything else with this name, is replaced, and not written to.
    Raises:  OSError if it cannot be written, with the name of `file`.
    """
    place = Path(file) if member else _real(file)
    try:
        if not member and _written_in_place(place):
            with _read_by_somebody(place):
                yield place
            return
        with scratch(place.parent) as folder:
            yield folder / place.name
            os.replace(folder / place.name, place)
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(file)) from error


def _real(file: str | Path) -> Path:
    """Return the path to which links lead; for an open pipe (/dev/stdout) return the path
    itself."""
    real = Path(os.path.realpath(file))
    return Path(file) if os.path.exists(file) and not os.path.exists(real) else real


@contextmanager
def _read_by_somebody(place: Path) -> Iterator[None]:
    """Context manager: inside, a named pipe can be opened without a wait.

    Raises:  OSError if nobody reads it.
    """
    if not stat.S_ISFIFO(os.stat(place).st_mode):
        yield
        return
    try:
        kept = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(
            errno.ENXIO, "is a pipe that no process reads; start its reader first"
        ) from None
    try:
        yield
    finally:
        os.close(kept)


def as_utf8(text: str) -> bytes:
    """Return a text as bytes for a file, independent of the locale; characters that are not valid
    Unicode, as in some file names, are escaped.

    In JSON such an escape is read as the same character again.
    """
    return text.encode("utf-8", "backslashreplace")


def reserve(file: int, offset: int, nbytes: int) -> None:
    """Reserve `nbytes` at the end of an open file, which read as zeros. Raises: OSError if the disk
    has no room.

    Where the system cannot reserve (macOS, some file systems), zeros are written.
    """
    if nbytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, offset, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    end = offset + nbytes
    while offset < end:
        offset += os.pwrite(file, bytes(min(PIECE, end - offset)), offset)


def _written_in_place(file: Path) -> bool:
    return os.path.exists(file) and not (
        os.path.isfile(file) and os.access(file.parent, os.W_OK | os.X_OK)
    )


def check_writable(option: str, file: str | Path | None) -> None:
    """Raise ConfigError, one line that begins with `option`, unless `whole` can write `file`, if
    there is one.

    It tries to write, because permission bits do not describe /proc or a read-only disk. Nothing is
    left behind.
    """
    if file is None:
        return
    place = _real(file)
    problem = ""
    try:
        if os.path.isdir(place):
            problem = "is a folder; name a file"
        elif not os.path.isdir(place.parent):
            problem = f"there is no folder {place.parent}"
        elif place.is_socket():
            problem = "is a socket; name a file"
        elif os.path.exists(place) and not os.access(place, os.W_OK):
            problem = "Permission denied"
        elif not _written_in_place(place):
            with scratch(place.parent) as folder:
                (folder / place.name).touch()  # a name can be too long
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(f"{option} {file}: {problem}")


def lock_holder(file: int) -> int | None:
    """Return the process that has locked an open file or folder (flock), if the system reports
    it."""
    state = os.fstat(file)
    inode = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    with suppress(OSError):
        found = re.search(
            rf"FLOCK +\S+ +\S+ (\d+) {inode} ", Path("/proc/locks").read_text(errors="replace")
        )
        return int(found[1]) or None if found else None
    return None
