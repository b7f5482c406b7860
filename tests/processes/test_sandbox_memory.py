"""Programs that hold memory in ways that the limit of an address space does not count."""

from __future__ import annotations

import pytest
from test_sandbox import method  # noqa: F401, a fixture

from rlflow.processes.sandbox.protocol import FILTERS
from rlflow.processes.sandbox.run import Outcome, SandboxLimits, SandboxResult, run

SMALL = SandboxLimits(seconds=30, cpu_seconds=20, memory_mb=64, file_mb=8, processes=16)
MOST_MB = 80

HEAD = """
import ctypes, errno, fcntl, mmap, os, signal, socket, struct, sys, time, _thread
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.shmat.restype = ctypes.c_void_p
libc.syscall.restype = ctypes.c_long
MB, PAGE = 2**20, 4096
kept, held = [], 0

def hold(num_bytes):
    "Say so, a megabyte at a time: each dot is one that this program holds."
    global held
    os.write(1, b"." * ((held + num_bytes) // MB - held // MB))
    held += num_bytes
    if held > 300 * MB:
        os._exit(0)

def call(number, *arguments):
    result = libc.syscall(number, *[each if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def raised(result):
    if result in (-1, None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def fill(descriptor, num_bytes):
    for _ in range(num_bytes // MB):
        os.write(descriptor, bytes(MB))
        hold(MB)

def stuff(send):
    "Until it takes no more."
    part = bytes(65536)
    while part:
        try:
            hold(send(part))
        except BlockingIOError:
            part = part[: len(part) // 2]
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            part = part[: len(part) // 2]

def map_anonymous(num_bytes, flags, descriptor=-1):
    address = raised(libc.mmap(None, num_bytes, 3, flags, descriptor, 0))
    ctypes.memset(address, 1, num_bytes)
    return address
"""

SOCKETS = """
while True:
    pair = socket.socketpair()
    kept.append(pair)
    for each in pair:
        each.setblocking(False)
        stuff(each.send)
"""

WAYS = {
    "private": "while True:\n    map_anonymous(MB, 0x22)\n    hold(MB)",
    "shared": "while True:\n    map_anonymous(MB, 0x21)\n    hold(MB)",
    # The object lives as long as one page of it is mapped, and only that page counts.
    "shared_with_one_page_left": """
while True:
    libc.munmap(map_anonymous(8 * MB, 0x21) + PAGE, 8 * MB - PAGE)
    hold(8 * MB)
""",
    "dev_zero_with_one_page_left": """
zero = os.open("/dev/zero", os.O_RDWR)
while True:
    libc.munmap(map_anonymous(8 * MB, 0x01, zero) + PAGE, 8 * MB - PAGE)
    hold(8 * MB)
""",
    "huge_pages_with_one_page_left": """
while True:
    address = raised(libc.mmap(None, 4 * MB, 3, 0x22, -1, 0))
    huge = -(-address // (2 * MB)) * 2 * MB
    libc.madvise(ctypes.c_void_p(huge), ctypes.c_size_t(2 * MB), 14)
    ctypes.memset(huge, 1, PAGE)
    told = ctypes.create_string_buffer(512)
    raised(libc.mincore(ctypes.c_void_p(huge), ctypes.c_size_t(2 * MB), told))
    whole = sum(byte & 1 for byte in told.raw) * PAGE
    libc.munmap(address, huge - address)
    libc.munmap(huge + PAGE, address + 4 * MB - huge - PAGE)
    hold(whole)
""",
    "memfd": "while True: kept.append(os.memfd_create('x')); fill(kept[-1], 8 * MB)",
    "memfd_secret": """
while True:
    secret = call({"x86_64": 447, "aarch64": 447}[os.uname().machine], 0)
    os.ftruncate(secret, 8 * MB)
    libc.munmap(map_anonymous(8 * MB, 0x01, secret) + PAGE, 8 * MB - PAGE)
    kept.append(secret)
    hold(8 * MB)
""",
    "standard_input": "while True: fill(0, MB)",
    "system_v_memory": """
while True:
    ctypes.memset(raised(libc.shmat(raised(libc.shmget(0, 8 * MB, 0o1600)), None, 0)), 1, 8 * MB)
    hold(8 * MB)
""",
    "system_v_memory_detached": """
while True:
    address = raised(libc.shmat(raised(libc.shmget(0, 8 * MB, 0o1600)), None, 0))
    ctypes.memset(address, 1, 8 * MB)
    libc.shmdt(ctypes.c_void_p(address))
    hold(8 * MB)
""",
    "system_v_messages": """
text = ctypes.create_string_buffer((1).to_bytes(8, "little") + bytes(8192), 8200)
while True:
    queue = raised(libc.msgget(0, 0o1600))
    while libc.msgsnd(queue, text, 8192, 0o4000) == 0:
        hold(8192)
""",
    "system_v_semaphores": "while True:\n    raised(libc.semget(0, 32000, 0o1600))\n    hold(32000 * 64)",
    "message_queues": """
librt, attributes = ctypes.CDLL(None, use_errno=True), struct.pack("8q", 0, 10, 8192, 0, 0, 0, 0, 0)
for number in range(1000):
    queue = raised(librt.mq_open(b"/q%d" % number, 0o4102, 0o600, attributes))
    while librt.mq_send(queue, bytes(8192), ctypes.c_size_t(8192), 0) == 0:
        hold(8192)
""",
    "pipes": """
while True:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stuff(lambda part: os.write(writer, part))
""",
    "larger_pipes": """
while True:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, MB)
    os.set_blocking(writer, False)
    stuff(lambda part: os.write(writer, part))
""",
    "pages_lent_to_pipes": """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
while True:
    reader, writer = os.pipe()
    for _ in range(16):
        address = raised(libc.mmap(None, 4 * MB, 3, 0x22, -1, 0))
        huge = -(-address // (2 * MB)) * 2 * MB
        libc.madvise(ctypes.c_void_p(huge), ctypes.c_size_t(2 * MB), 14)
        ctypes.memset(huge, 1, 2 * MB)
        raised(libc.vmsplice(writer, ctypes.byref(Vector(huge, PAGE)), ctypes.c_size_t(1), 0))
        libc.munmap(address, 4 * MB)
        hold(2 * MB)
""",
    "file_pages_lent_to_pipes": """
while True:
    reader, writer = os.pipe()
    with open("lent", "wb+", buffering=0) as file:
        file.write(bytes(61440))
        file.seek(0)
        hold(os.splice(file.fileno(), writer, 61440))
    os.unlink("lent")
""",
    "file_pages_sent_to_sockets": """
while True:
    pair = socket.socketpair()
    kept.append(pair)
    with open("lent", "wb+", buffering=0) as file:
        file.write(bytes(61440))
        hold(os.sendfile(pair[0].fileno(), file.fileno(), 0, 61440))
    os.unlink("lent")
""",
    "sockets": SOCKETS,
    "larger_sockets": """
while True:
    pair = socket.socketpair()
    kept.append(pair)
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MB)
        each.setblocking(False)
        stuff(each.send)
""",
    "sockets_under_way": """
a, b = socket.socketpair()
while True:
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
        stuff(each.send)
    socket.send_fds(a, [b"x"], [each.fileno() for each in pair])
    for each in pair:
        each.close()
""",
    "sockets_that_nobody_accepts": """
for number in range(100):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"s{number}")
    listener.listen(4096)
    kept.append(listener)
    for _ in range(4000):
        with socket.socket(socket.AF_UNIX) as each:
            each.setblocking(False)
            each.connect(f"s{number}")
            stuff(each.send)
""",
    "datagrams_of_closed_sockets": """
while True:
    receiver, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    kept.append(receiver)
    receiver.bind(name := f"d{len(kept)}")
    raised(libc.connect(receiver.fileno(), bytes(2), 2))
    for _ in range(11):
        for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            each.setblocking(False)
            try:
                hold(each.sendto(bytes(200000), name))
            except BlockingIOError:
                pass
            each.close()
""",
    "watched_files": """
watch = raised(libc.inotify_init1(0))
for folder, _, names in os.walk("/usr"):
    for name in names:
        if libc.inotify_add_watch(watch, os.path.join(folder, name).encode(), 2) > 0:
            hold(1100)
""",
    "access_control_lists": """
entries = [(1, 7, -1)] + [(2, 7, os.getuid()) for number in range(8180)] + [(4, 7, -1), (16, 7, -1), (32, 7, -1)]
words = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)
while True:
    for folder in (".", "/tmp"):
        name = f"{folder}/f{len(kept)}"
        kept.append(name)
        open(name, "w").close()
        os.setxattr(name, "system.posix_acl_access", words)
        if len(os.getxattr(name, "system.posix_acl_access")) != len(words):
            raise OSError("there is no such list")
        hold(len(entries) * 12)
""",
    "empty_files": """
names = "x" * 200
for folder in (".", "/tmp", "/dev/shm"):
    try:
        while True:
            os.symlink(names, f"{folder}/{len(kept):0200}")
            kept.append(0)
            hold(1200)
    except OSError:
        pass
""",
    "files": """
for folder in (".", "/tmp", "/dev/shm"):
    try:
        while True:
            kept.append(open(f"{folder}/f{len(kept)}", "wb", buffering=0))
            fill(kept[-1].fileno(), 4 * MB)
    except OSError:
        pass
""",
    "mapped_files": """
for folder in ("/dev/shm", "/tmp"):
    try:
        while True:
            with open(f"{folder}/f{len(kept)}", "wb+") as file:
                os.posix_fallocate(file.fileno(), 0, 4 * MB)
                map_anonymous(4 * MB, 0x01, file.fileno())
                os.unlink(file.name)
                kept.append(0)
                hold(4 * MB)
    except OSError:
        pass
""",
    "processes": """
def grow():
    while True:
        map_anonymous(MB, 0x22)
        hold(MB)
for _ in range(15):
    if os.fork() == 0:
        grow()
grow()
""",
    "processes_with_shared_memory": """
for _ in range(15):
    if os.fork() == 0:
        break
while True:
    map_anonymous(4 * MB, 0x21)
    hold(4 * MB)
""",
    "processes_with_sockets": """
for _ in range(15):
    if os.fork() == 0:
        break
"""
    + SOCKETS,
    "threads": """
_thread.stack_size(32768)
while True:
    _thread.start_new_thread(time.sleep, (1000,))
    hold(26000)
""",
    "timers": """
while True:
    raised(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())))
    hold(400)
""",
    "waiting_signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
while True:
    raised(libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), ctypes.c_void_p()))
    hold(160)
""",
    "filters_of_its_own": """
code = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000) * 4000
buffer = ctypes.create_string_buffer(code)
while True:
    raised(libc.prctl(22, 2, struct.pack("@HP", 4000, ctypes.addressof(buffer)), 0, 0))
    hold(32000)
""",
    "rules_of_landlock": """
rules = call(444, struct.pack("Q", 4), 8, 0)
for folder, _, names in os.walk("/usr"):
    for name in names:
        opened = os.open(os.path.join(folder, name), os.O_PATH)
        call(445, rules, 1, struct.pack("=Qi", 4, opened), 0)
        os.close(opened)
        hold(1100)
""",
    "asynchronous_files": """
context = ctypes.c_ulong()
for _ in range(20):
    context.value = 0
    raised(libc.syscall({"x86_64": 206, "aarch64": 0}[os.uname().machine], 3000, ctypes.byref(context)))
    hold(3000 * 64)
""",
}


async def held_by(way: str) -> tuple[int, SandboxResult]:
    """Megabytes that a program held at the same time, counted by itself."""
    result = await run(f"{HEAD}\ntry:\n" + indented(WAYS[way]) + TAIL, limits=SMALL)
    return result.stdout.count("."), result


def indented(source: str) -> str:
    return "".join(f"    {line}\n" for line in source.splitlines())


TAIL = (
    "except (OSError, AttributeError, RuntimeError, MemoryError) as error:\n"
    "    print(repr(error), file=sys.stderr, flush=True)\n"
    "os._exit(0)\n"
)


@pytest.mark.parametrize("way", WAYS)
async def test_no_more_memory_than_allowed(method: str, way: str) -> None:  # noqa: F811
    if method == FILTERS and way in ("files", "empty_files"):
        pytest.skip("on disk")
    held, result = await held_by(way)
    # Without a cgroup, the sum over processes is looked at a hundred times a second; unbounded it is 768 MB.
    assert held <= (4 * MOST_MB if way.startswith("processes") else MOST_MB), result
    assert result.outcome in (Outcome.EXITED, Outcome.OUT_OF_MEMORY), result


async def test_processes_are_ended_when_they_hold_too_much_together(method: str) -> None:  # noqa: F811
    if method == FILTERS:
        pytest.skip("one process")
    _, result = await held_by("processes")
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, None)


async def test_pages_that_processes_share_count_once(method: str) -> None:  # noqa: F811
    source = """
import os, time
held = bytearray(30 * 2**20)
for place in range(0, len(held), 4096):
    held[place] = 1
try:
    children = [os.fork() for _ in range(4)]
    if 0 in children:
        time.sleep(0.5)
        os._exit(0)
    for each in children:
        os.waitpid(each, 0)
except PermissionError:
    pass
print(len(held))
"""
    result = await run(source, limits=SMALL)
    assert (result.outcome, result.stdout) == (Outcome.EXITED, "31457280\n"), result
