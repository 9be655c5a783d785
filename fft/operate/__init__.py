"""Operations on a running job: watch it, send it messages, drain or evict groups, inject faults.

Everything here reaches the job through its bus alone, and nothing here imports torch by itself.
"""
