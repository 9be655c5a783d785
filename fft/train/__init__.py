"""What a training script uses, and the only room that loads torch: the manager and its parts."""
