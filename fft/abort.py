"""Ready-made aborts for `ManagerFFT.on_abort`; `fft.train.abort` describes them."""

from fft.train.abort import nvshmem as nvshmem
from fft.train.abort import process_groups as process_groups
from fft.train.abort import transformer_engine as transformer_engine
