"""What runs in the processes of `rlflow.sandbox`. Standard library only: it is imported by a bare interpreter."""
