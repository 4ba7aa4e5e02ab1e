"""The parts that drive links: frames, streams of messages, mailboxes, the poll loop and the
progress engine."""
