"""Failure detection, so that no rank hangs: the monitor to which every rank is connected,
watchdogs, deadlock detection, rendezvous."""
