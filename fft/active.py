"""Rules for ``ManagerConfig(active=[…])``; `fft.protocol.active` describes them."""

from fft.protocol.active import divisible_by, max_active, whole

__all__ = ["divisible_by", "max_active", "whole"]
