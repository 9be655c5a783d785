"""Durable checkpoints of a rank: taken at a commit in the background, and loaded at start."""
