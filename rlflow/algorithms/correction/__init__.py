"""Corrections for tokens that another policy sampled: weights of the loss. The file's name is the correction's name."""
