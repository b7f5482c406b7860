"""Policy losses: flat tensors [N] of loss tokens in, one loss a token out."""
