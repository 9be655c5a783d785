"""Ready-made aborts for `ManagerFFT.on_abort`; `fft.train.guard.abort` describes them."""

from fft.train.guard.abort import nvshmem, process_groups, transformer_engine

__all__ = ["nvshmem", "process_groups", "transformer_engine"]
