"""Which task is played next; one file each, and your own as a class. Pure."""
