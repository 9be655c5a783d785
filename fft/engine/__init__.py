"""The engine that runs one participant in a process: its thread, its timers and its votes."""
