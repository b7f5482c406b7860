"""A world of its own: user, process, network, IPC, host name and mount namespaces, made here or by bubblewrap.

`leave` is called by the supervisor, whose next child is process 1 of the new world; that child calls `build_root`.
When process 1 ends, the kernel kills every other process in there, however it detached itself.
"""

import os
from collections.abc import Sequence

from rlflow.processes.sandbox import linux

HOME = "/sandbox"
DEVICES = ("null", "full", "random", "urandom")
"""Not zero: what is mapped from it outlives its mapping, and then no limit counts it."""
NOBODY = 65534
MAX_FILES = 4096


def bubblewrap_command(
    bwrap: str, readable: Sequence[str], package: str, megabytes: int, program: Sequence[str]
) -> list[str]:
    """bubblewrap (0.7 or later) around `program`, which is process 1 and sees `readable` and the folder `package`.

    `package` is shown at its own path; `megabytes` bounds HOME and /tmp, each.
    """
    words = [bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    for folder in (HOME, "/tmp"):
        words += ["--size", str(megabytes * 2**20), "--tmpfs", folder]
    for path in readable:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--symlink", "/tmp", "/dev/shm", "--ro-bind", package, package]
    return [*words, "--remount-ro", "/", "--chdir", HOME, "--", *program]


def leave() -> None:
    """Enter new namespaces, all but the mounts. Root is mapped to itself, and `NOBODY` to the program's user."""
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        linux.unshare(flags)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
        return
    # To map two users takes a process outside of the namespace that writes the maps.
    target = os.getpid()
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go_write)
        os._exit(_write_maps(target) if os.read(go_read, 1) else 1)
    os.close(go_read)
    try:
        linux.unshare(flags)
        os.write(go_write, b"g")
    finally:
        os.close(go_write)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError(os.waitstatus_to_exitcode(status), "the user map of the namespace could not be written")


def _write_maps(target: int) -> int:
    """An errno, or 0."""
    try:
        for name in ("uid_map", "gid_map"):
            write(f"/proc/{target}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    except OSError as error:
        return error.errno or 1
    return 0


def build_root(readable: list[str], megabytes: int) -> None:
    """Replace the file system by an empty one in memory with `readable` in it, and go to HOME.

    HOME and /tmp can be written to, each up to `megabytes`; all else is read-only.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    _mount_memory("/tmp", 1, "755")
    os.chdir("/tmp")
    os.mkdir("old")
    linux.pivot_root(".", "old")
    os.chdir("/")
    for folder in (HOME, "/tmp"):  # before what is shown: an environment of Python's may be below /tmp
        os.mkdir(folder)
        _mount_memory(folder, megabytes, "1777")
    for path in readable:
        source = f"/old{path}"
        if os.path.islink(source):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(source), path)
        else:
            _bind(source, path)
            linux.make_read_only(path, with_mounts_below=True)
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}")
    os.symlink("/tmp", "/dev/shm")
    linux.unmount("/old")
    os.rmdir("/old")
    linux.make_read_only("/", with_mounts_below=False)
    os.chdir(HOME)


def _mount_memory(folder: str, megabytes: int, mode: str) -> None:
    options = f"size={megabytes}m,nr_inodes={MAX_FILES},mode={mode}"
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def _bind(source: str, path: str) -> None:
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(source, path, "", linux.MS_BIND | linux.MS_REC)


def become_nobody() -> None:
    """Root of the namespace leaves it to the program's own user; its processes are counted by that user."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
