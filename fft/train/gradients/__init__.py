"""The reduction of gradients across the groups."""
