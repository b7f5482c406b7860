"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens, in nats (Schulman 2020).

The file's name is the estimate's name.
"""
