"""Ready-made checks for `ManagerFFT.health_check`, of `fft.train.guard.health_checks`."""

from fft.train.guard.health_checks import device, disk, gpu, memory, network_interface

__all__ = ["device", "disk", "gpu", "memory", "network_interface"]
