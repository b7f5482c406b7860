"""`python -m rlflow` is the command `rlflow`."""

from rlflow.cli import main

raise SystemExit(main())
