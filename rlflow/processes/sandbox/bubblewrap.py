"""The command line of bubblewrap (https://github.com/containers/bubblewrap, 0.7 or later). Pure but for what exists."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlflow.processes.sandbox.namespaces import DEVICES, HOME


def command(bwrap: str, readable: Sequence[str], package: str, megabytes: int, program: Sequence[str]) -> list[str]:
    """bubblewrap around `program`, which is process 1 of the new world and sees `readable` and the folder `package`.

    `package` is shown at its own path; `megabytes` bounds HOME and /tmp, each.
    """
    size = str(megabytes * 2**20)
    words = [bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    for folder in (HOME, "/tmp"):
        words += ["--size", size, "--tmpfs", folder]
    for path in readable:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind", path, path]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--symlink", "/tmp", "/dev/shm", "--ro-bind", package, package]
    return [*words, "--remount-ro", "/", "--chdir", HOME, "--", *program]
