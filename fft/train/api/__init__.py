"""The interface of training scripts: the manager, and functions on it."""
