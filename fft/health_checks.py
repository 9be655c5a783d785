"""Ready-made checks for `ManagerFFT.health_check`; `fft.train.health_checks` describes them."""

from fft.train.health_checks import device, disk, gpu, memory, network_interface

__all__ = ["device", "disk", "gpu", "memory", "network_interface"]
