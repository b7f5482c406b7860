"""Exit codes of `rlflow submit` that are not the job's own."""

from __future__ import annotations

import signal

LOST = 75
"""The cluster does not answer, or not us, which says nothing about the job: a failure that may pass (EX_TEMPFAIL)."""
INTERRUPTED, STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Of a run that these have ended before its last step."""
UNREAD = 128 + signal.SIGPIPE
"""Nobody reads on, as behind `| head`."""
