"""Supervision of the main thread, and actions around a failed attempt."""
