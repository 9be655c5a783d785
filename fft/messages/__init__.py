"""Messages that cross the bus: those of the protocol, commands, and reports. Pure data."""
