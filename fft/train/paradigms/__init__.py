"""The paradigms of training, each behind the interface in `fft.train.session.paradigm`."""
