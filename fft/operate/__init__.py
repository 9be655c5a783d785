"""What operators do to a running job: look at it, speak to it, take groups out, break it.

Everything here reaches the job by its bus alone; nothing here loads torch by itself.
"""
