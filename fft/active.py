"""Rules for ``ManagerConfig(active=[…])``; `fft.protocol.active` describes them."""

from fft.protocol.active import divisible_by as divisible_by
from fft.protocol.active import max_active as max_active
from fft.protocol.active import whole as whole
