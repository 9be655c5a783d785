"""Runs one participant in a process: the thread that owns it, its timers and its votes."""
