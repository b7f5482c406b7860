"""Calls of Linux that Python 3.11 has no function for. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os

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

# The same on x86-64 and on aarch64.
NR_MOUNT_SETATTR = 442
NR_LANDLOCK_CREATE_RULESET = 444
NR_LANDLOCK_ADD_RULE = 445
NR_LANDLOCK_RESTRICT_SELF = 446
NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 1 | 2 | 4

_LIBC = ctypes.CDLL(None, use_errno=True)


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def system_call(name: str, number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    longs = [each if isinstance(each, ctypes.Array) else ctypes.c_long(each or 0) for each in arguments]
    return _checked(name, _LIBC.syscall(ctypes.c_long(number), *longs))


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
    result = _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _checked(f"mount {target}", result)


def unmount(target: str) -> None:
    _checked(f"umount {target}", _LIBC.umount2(target.encode(), ctypes.c_int(_MNT_DETACH)))


def make_read_only(target: str, *, with_mounts_below: bool) -> None:
    """And without set-user-id programs and devices."""
    attributes = ctypes.create_string_buffer(_MOUNT_ATTR_RDONLY_NOSUID_NODEV.to_bytes(8, "little") + bytes(24), 32)
    path = ctypes.create_string_buffer(target.encode())
    flags = _AT_RECURSIVE if with_mounts_below else 0
    system_call("mount_setattr", NR_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, 32)


def pivot_root(new: str, old: str) -> None:
    number = NR_PIVOT_ROOT[os.uname().machine]
    system_call(
        "pivot_root", number, ctypes.create_string_buffer(new.encode()), ctypes.create_string_buffer(old.encode())
    )
