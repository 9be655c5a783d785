"""What crosses the bus: the words of the protocol, and those beside it. Pure data."""
