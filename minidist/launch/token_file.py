"""The job's token in a private file, for ranks whose launcher cannot pass our secret on
(joining.py)."""

import contextlib
import fcntl
import hashlib
import os

from minidist.errors import LaunchError
from minidist.files import open_regular, scratch, sweep, user_folder

STALE = 600.0  # seconds until a token without a lock may go: other hosts may not see the lock


class TokenFile:
    """The job's token in a file that only this user can read, under launchers that pass no secret
    on (torchrun, srun).

    Nodes find it through a shared home; without one, the user sets MINIDIST_TOKEN. Rank 0 holds a
    lock on the file until it is removed. So a file without a lock belongs to a killed job, and the
    next write removes it.
    """

    def __init__(self, job: str) -> None:
        cache = user_folder("XDG_CACHE_HOME", ".cache")
        self.path = cache / "minidist" / f"job-{hashlib.sha256(os.fsencode(job)).hexdigest()[:24]}"
        self._lock: int | None = None

    def write(self, token: bytes) -> None:
        """Write the token, in one step.

        Raises: LaunchError if the place cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(self.path.parent, "job-", older=STALE)
            with scratch(self.path.parent) as folder:
                draft = folder / "token"
                self._lock = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, token)
                draft.replace(self.path)
        except OSError as error:
            raise LaunchError(
                f"cannot write the job's token below {self.path.parent} ({error.strerror}); set "
                "MINIDIST_TOKEN for every rank instead"
            ) from error

    def read(self) -> bytes | None:
        """Return the token, or None while there is none.

        Raises: LaunchError if another user could have written or read it.
        """
        try:
            with open(open_regular(self.path, member=True), "rb") as file:
                state = os.fstat(file.fileno())
                if state.st_uid != os.geteuid() or state.st_mode & 0o077:
                    raise LaunchError(
                        f"{self.path} is not private to this user; remove it and start the job "
                        "again"
                    )
                return file.read()
        except OSError:
            return None

    def is_held(self) -> bool:
        """Return whether the process that wrote the token still holds it.

        If not, a killed job left it.
        """
        with (
            contextlib.suppress(OSError),
            open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        return self.path.exists()  # locked, or a file system without locks

    def remove(self) -> None:
        """Remove the file: every rank has the token."""
        self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
