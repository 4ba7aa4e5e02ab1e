"""Communication: the transports, and the groups and collectives that use them."""
