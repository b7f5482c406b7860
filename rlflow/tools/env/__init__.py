"""`rlflow env check` and `rlflow env new`."""
