"""Environments and rewards that ship with rlflow; `base.py` says what a user's own must offer."""
