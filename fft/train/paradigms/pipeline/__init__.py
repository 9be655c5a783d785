"""Synchronous pipelines: the stages of a group commit each step together."""
