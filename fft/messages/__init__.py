"""What crosses the bus: the messages of the protocol, and others. Pure data."""
