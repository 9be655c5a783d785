"""Stages of a pipeline that step by themselves: their scopes, and what one gives to the next."""
