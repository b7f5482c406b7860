"""Calls of Linux that Python 3.11 has no function for, Landlock's among them. Each raises OSError with its name."""

import ctypes
import fcntl
import os
import struct
from collections.abc import Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SET_THP_DISABLE = 41

# The same on x86-64 and on aarch64.
_NR_MOUNT_SETATTR = 442
_NR_LANDLOCK_CREATE_RULESET = 444
_NR_LANDLOCK_ADD_RULE = 445
_NR_LANDLOCK_RESTRICT_SELF = 446
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_F_ADD_SEALS = 1033
_SEAL_ALL = 1 | 2 | 4 | 8
"""No further seals, shorter, longer, other content."""

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 1 | 2 | 4

_EXECUTE_AND_READ = 1 << 0 | 1 << 2 | 1 << 3
_READ_FILE = 1 << 2
_WRITE_FILE = 1 << 1
_ALL_OF_VERSION_3 = (1 << 15) - 1
_RIGHTS_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
"""Those that a rule may have about something else than a folder."""
_LANDLOCK_VERSION = 1
_RULE_PATH_BENEATH = 1

_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(name: str, option: int, *arguments: int | ctypes.c_void_p) -> int:
    padded = [*arguments, 0, 0, 0, 0][:4]
    longs = [each if isinstance(each, ctypes.c_void_p) else ctypes.c_ulong(each) for each in padded]
    return _checked(f"prctl {name}", _LIBC.prctl(ctypes.c_int(option), *longs))


def die_with_parent() -> None:
    prctl("PDEATHSIG", PR_SET_PDEATHSIG, 9)


def unshare(flags: int) -> None:
    _checked("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [each.encode() for each in (source, target, kind)]
    _checked(f"mount {target}", _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode()))


def unmount(target: str) -> None:
    _checked(f"umount {target}", _LIBC.umount2(target.encode(), ctypes.c_int(_MNT_DETACH)))


def make_read_only(target: str, *, with_mounts_below: bool) -> None:
    """And without set-user-id programs and devices."""
    attributes = ctypes.create_string_buffer(_MOUNT_ATTR_RDONLY_NOSUID_NODEV.to_bytes(8, "little") + bytes(24), 32)
    path = ctypes.create_string_buffer(target.encode())
    flags = _AT_RECURSIVE if with_mounts_below else 0
    _system_call("mount_setattr", _NR_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, 32)


def pivot_root(new: str, old: str) -> None:
    paths = [ctypes.create_string_buffer(each.encode()) for each in (new, old)]
    _system_call("pivot_root", _NR_PIVOT_ROOT[os.uname().machine], *paths)


def memory_file(content: bytes) -> int:
    """A descriptor, which programs inherit, from which `content` can be read, and where nothing can be written."""
    descriptor = os.memfd_create("rlflow", os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_ALL)
    return descriptor


def restrict_files(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> None:
    """Let this process and all that it starts touch no other files, from now on and for good.

    By Landlock (https://docs.kernel.org/userspace-api/landlock.html). The process must not be able to gain privileges
    (NO_NEW_PRIVS).

    Raises:
        OSError: the kernel has no Landlock, or one that cannot guard truncation.
    """
    version = _system_call("Landlock", _NR_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    if version < 3:
        raise OSError(0, f"Landlock has version {version}; 3 (Linux 6.2) is needed")
    attributes = ctypes.create_string_buffer(struct.pack("=Q", _ALL_OF_VERSION_3), 8)
    ruleset = _system_call("landlock_create_ruleset", _NR_LANDLOCK_CREATE_RULESET, attributes, 8, 0)
    rules = [(path, _EXECUTE_AND_READ) for path in readable]
    rules += [(path, _ALL_OF_VERSION_3) for path in writable]
    rules += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
    try:
        for path, rights in rules:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = rights if os.path.isdir(path) else rights & _RIGHTS_OF_FILES
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor), 12)
                _system_call("landlock_add_rule", _NR_LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
            finally:
                os.close(descriptor)
        _system_call("landlock_restrict_self", _NR_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _system_call(name: str, number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    longs = [each if isinstance(each, ctypes.Array) else ctypes.c_long(each or 0) for each in arguments]
    return _checked(name, _LIBC.syscall(ctypes.c_long(number), *longs))


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
