"""Which items a rank takes, and what loads them."""
