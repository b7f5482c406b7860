"""Advantage estimators: scored groups in, advantages out. The file's name is the estimator's name; no tensors."""
