"""Clusters of pure participants in one process: no thread, clock, socket or torch."""
