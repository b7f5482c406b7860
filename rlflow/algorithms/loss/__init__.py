"""Policy losses: the loss tokens of a row in, one loss a token out. The file's name is the loss's name."""
