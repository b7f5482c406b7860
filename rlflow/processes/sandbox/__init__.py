"""What runs in the processes of `processes.sandbox.run`. Standard library only: a bare interpreter imports it."""
