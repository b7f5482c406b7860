"""System calls that a program is refused (https://docs.kernel.org/userspace-api/seccomp_filter.html).

What reaches deeper into the kernel than a program needs, what holds memory that no limit counts, and every socket but
a connected pair. Without namespaces also further processes, and signals and settings of other processes.
"""

import ctypes
import errno
import fcntl
import os
import struct
from typing import NamedTuple

from rlflow.processes.sandbox import linux

Calls = dict[str, tuple[int | None, int | None]]
"""Name: number on x86_64, number on aarch64; None where there is no such call."""

_DEEP: Calls = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}  # fmt: skip

_UNCOUNTED: Calls = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "sendfile": (40, 71), "io_setup": (206, 0),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "socket": (41, 198), "connect": (42, 203), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
"""Memory that RLIMIT_AS does not count: objects without a mapping, pages that a pipe borrows, what a socket holds that
is not open in any process, lists and rules that pin a file each."""

_OF_OTHERS: Calls = {
    "fork": (57, None), "vfork": (58, None), "setsid": (112, 157), "setpgid": (109, 154),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "process_madvise": (440, 440), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip

_WITHOUT_EFFECT: Calls = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
"""Landlock does not guard these, so that they would work on files outside. They seem to succeed, because copying a file
calls one of them."""

_CLONE3: Calls = {"clone3": (435, 435)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000

_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_ALLOW = 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16


class _If(NamedTuple):
    """A condition on the lower 32 bits of an argument of a call."""

    argument: int
    operation: int
    value: int
    is_true: bool = True


_Conditions = tuple[_If, ...]

_CLONE = (56, 220)
_PRCTL = (157, 167)
_NEW_NAMESPACES, _CLONE_THREAD, _CLONE_FILES = 0x7E020000, 0x00010000, 0x00000400
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_AF_UNIX, _OTHER_THAN_STREAM = 1, 0x0E
_CLOSE_RANGE_UNSHARE = 2
_PR_SET_DUMPABLE = 4
_F_SETPIPE_SZ = 1031

_BY_ARGUMENT: dict[tuple[int, int], list[_Conditions]] = {
    _CLONE: [
        (_If(0, _JUMP_ANY_BIT, _NEW_NAMESPACES),),
        # What a descriptor holds is counted by process.
        (_If(0, _JUMP_ANY_BIT, _CLONE_THREAD), _If(0, _JUMP_ANY_BIT, _CLONE_FILES, False)),
    ],
    (436, 436): [(_If(2, _JUMP_ANY_BIT, _CLOSE_RANGE_UNSHARE),)],
    # mmap: memory that lives on when all but one page of it is unmapped.
    (9, 222): [(_If(3, _JUMP_ANY_BIT, _MAP_SHARED), _If(3, _JUMP_ANY_BIT, _MAP_ANONYMOUS))],
    # socketpair: a datagram outlives the socket that sent it.
    (53, 199): [(_If(0, _JUMP_EQUAL, _AF_UNIX, False),), (_If(1, _JUMP_ANY_BIT, _OTHER_THAN_STREAM),)],
    (72, 25): [(_If(1, _JUMP_EQUAL, each),) for each in (fcntl.F_NOTIFY, _F_SETPIPE_SZ)],
    _PRCTL: [
        (_If(0, _JUMP_EQUAL, each),) for each in (_PR_SET_DUMPABLE, linux.PR_SET_SECCOMP, linux.PR_SET_THP_DISABLE)
    ],
}
"""Numbers of a call on x86_64 and aarch64 -> conditions, any of which refuses it when all its parts hold."""

_KILL = (62, 129)
_OWN_PROCESS_ONLY: dict[str, tuple[int, int]] = {
    "kill": _KILL, "tgkill": (234, 131), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
"""The first argument is a process; `kill` apart, 0 means the caller."""

_INSTRUCTION_BYTES = 8
_INSTALL_FILTER = 2


def install(*, alone: bool) -> None:
    """Filter the calls of this process and of all that it starts, for good.

    alone: it has no namespaces of its own. It must not be able to gain privileges (NO_NEW_PRIVS).

    Raises:
        OSError: the kernel or the container refuses filters, or the machine is neither x86_64 nor aarch64.
    """
    code = program_of(os.uname().machine, os.getpid() if alone else None)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // _INSTRUCTION_BYTES, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(head, len(head))
    linux.prctl("SECCOMP", linux.PR_SET_SECCOMP, _INSTALL_FILTER, ctypes.c_void_p(ctypes.addressof(pointer)))


def program_of(machine: str, alone_pid: int | None) -> bytes:
    """The filter as BPF code, 8 bytes an instruction; `alone_pid` is the process when it has no namespaces."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls of {machine} are not known; x86_64 and aarch64 are")
    column, architecture = _ARCHITECTURES[machine]
    code = [
        _statement(_LOAD, _ARCHITECTURE_OFFSET),
        _jump(_JUMP_EQUAL, architecture, 1, 0),
        _statement(_RETURN, _KILL_PROCESS),
        _statement(_LOAD, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        code += [_jump(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    code += _refusals(_DEEP | _UNCOUNTED, column, errno.EPERM) + _refusals(_CLONE3, column, errno.ENOSYS)
    by_argument = dict(_BY_ARGUMENT)
    if alone_pid is not None:
        code += _refusals(_OF_OTHERS, column, errno.EPERM) + _refusals(_WITHOUT_EFFECT, column, 0)
        for call, refusals in _alone(alone_pid).items():
            by_argument[call] = [*by_argument.get(call, ()), *refusals]
    for call, refusals in by_argument.items():
        body = b"".join(_refusal(each) for each in refusals) + _statement(_RETURN, _ALLOW)
        code += [_jump(_JUMP_EQUAL, call[column], 0, len(body) // _INSTRUCTION_BYTES), body]
    return b"".join([*code, _statement(_RETURN, _ALLOW)])


def _alone(pid: int) -> dict[tuple[int, int], list[_Conditions]]:
    found: dict[tuple[int, int], list[_Conditions]] = {
        _CLONE: [(_If(0, _JUMP_ANY_BIT, _CLONE_THREAD, False),)],
        _PRCTL: [(_If(0, _JUMP_EQUAL, linux.PR_SET_PDEATHSIG),)],
    }
    for call in _OWN_PROCESS_ONLY.values():
        own = (pid,) if call == _KILL else (pid, 0)
        found[call] = [tuple(_If(0, _JUMP_EQUAL, each, False) for each in own)]
    return found


def _refusal(conditions: _Conditions) -> bytes:
    code = [_refuse(errno.EPERM)]
    for each in reversed(conditions):
        ways = (0, len(code)) if each.is_true else (len(code), 0)
        load = _statement(_LOAD, _ARGUMENTS_OFFSET + 8 * each.argument)
        code = [load, _jump(each.operation, each.value, *ways), *code]
    return b"".join(code)


def _refusals(calls: Calls, column: int, number: int) -> list[bytes]:
    code: list[bytes] = []
    for numbers in calls.values():
        if (call := numbers[column]) is not None:
            code += [_jump(_JUMP_EQUAL, call, 0, 1), _refuse(number)]
    return code


def _refuse(number: int) -> bytes:
    return _statement(_RETURN, _ERRNO | number)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
