"""Handing a run to a cluster: `rlflow submit`."""
