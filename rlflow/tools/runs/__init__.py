"""Runs as they lie on disk, finished or not: `rlflow runs` lists them, `rlflow compare` lays them side by side."""
