"""Pipelines whose stages share a step: each rank of a group holds stages of the model."""
