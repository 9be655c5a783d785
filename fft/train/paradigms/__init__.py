"""The paradigms of training, each behind the interface in `fft.train.paradigms.paradigm`."""
