"""Utilities that every package may use; they do not depend on training, jobs or the protocol."""
