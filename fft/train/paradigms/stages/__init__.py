"""Asynchronous pipelines: the scopes of the stages, and the data that they pass on."""
