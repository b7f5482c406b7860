"""Measurements that anybody can repeat: `rlflow bench <name> --json`."""
