"""Ready-made aborts for `ManagerFFT.on_abort`; `fft.train.abort` describes them."""

from fft.train.abort import nvshmem, process_groups, transformer_engine

__all__ = ["nvshmem", "process_groups", "transformer_engine"]
