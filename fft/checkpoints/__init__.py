"""Durable checkpoints without torch: their files, their stores, and the settings."""
