"""Advantages, losses and corrections: pure functions, one file each. None of them knows Ray, vLLM or the trainer."""
