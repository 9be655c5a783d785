"""Durable checkpoints of a rank: taken at a commit beside the training, and loaded at the start."""
