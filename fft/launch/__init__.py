"""Starts a job: its services, its processes, and again those that died."""
