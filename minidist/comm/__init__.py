"""Moving bytes: transports below, groups and their collectives above."""
