"""What training scripts use: the manager, and functions on it."""
