"""Advantages of single tokens, from the values of a critic. The file's name is the estimator's name."""
