"""Nothing hangs: the monitor that every rank is connected to, watchdogs, deadlock detection,
rendezvous."""
