"""Start a job's services and processes, and restart the processes that died."""
