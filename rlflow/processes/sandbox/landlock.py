"""Landlock: which files a process may touch (Linux 6.2 or later; https://docs.kernel.org/userspace-api/landlock.html)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from rlflow.processes.sandbox import linux

EXECUTE_AND_READ = 1 << 0 | 1 << 2 | 1 << 3
READ_FILE = 1 << 2
WRITE_FILE = 1 << 1
ALL_OF_VERSION_3 = (1 << 15) - 1
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
"""Rights that a rule about something else than a folder may have."""
_VERSION = 1
_RULE_PATH_BENEATH = 1


def restrict(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> None:
    """This process and all that it starts see no other files, from now on and for good.

    It must not be able to gain privileges (NO_NEW_PRIVS).

    Raises:
        OSError: the kernel has no Landlock, or one that cannot guard truncation.
    """
    version = linux.system_call("Landlock", linux.NR_LANDLOCK_CREATE_RULESET, None, 0, _VERSION)
    if version < 3:
        raise OSError(0, f"Landlock has version {version}; 3 (Linux 6.2) is needed")
    attributes = ctypes.create_string_buffer(struct.pack("=Q", ALL_OF_VERSION_3), 8)
    ruleset = linux.system_call("landlock_create_ruleset", linux.NR_LANDLOCK_CREATE_RULESET, attributes, 8, 0)
    rules = [(path, EXECUTE_AND_READ) for path in readable]
    rules += [(path, ALL_OF_VERSION_3) for path in writable]
    rules += [(path, READ_FILE | WRITE_FILE) for path in devices]
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights)
        linux.system_call("landlock_restrict_self", linux.NR_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        number = linux.NR_LANDLOCK_ADD_RULE
        linux.system_call("landlock_add_rule", number, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
