"""The proof kit: everything that a GPU must show, in one command: `rlflow bench gpu`."""
