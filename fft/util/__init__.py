"""What every room may use. Knows nothing of training, of jobs or of FFT's protocol."""
