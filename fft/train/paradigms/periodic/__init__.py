"""Training with local steps and periodic synchronization: LocalSGD and DiLoCo."""
