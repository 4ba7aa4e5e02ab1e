"""How a job starts: which launcher started us, and starting processes ourselves."""

from minidist.launch.launchers import LAUNCHERS, Launch, Launcher, detect

__all__ = ["LAUNCHERS", "Launch", "Launcher", "detect"]
