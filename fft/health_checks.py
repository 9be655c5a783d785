"""Ready-made checks for `ManagerFFT.health_check`; `fft.train.health_checks` describes them."""

from fft.train.health_checks import device as device
from fft.train.health_checks import disk as disk
from fft.train.health_checks import gpu as gpu
from fft.train.health_checks import memory as memory
from fft.train.health_checks import network_interface as network_interface
