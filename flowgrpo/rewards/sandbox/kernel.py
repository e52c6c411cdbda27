"""The walls of a box, as calls of the Linux kernel: namespaces, a private root, Landlock, seccomp, limits, no rights.

Everything here is irreversible for the process that calls it, and for all that the process starts. The calls go through
`ctypes`, because Python 3.10 has no functions for them. This module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence

from .syscalls import install_filter

WALLS = ("namespaces", "landlock", "seccomp")
NOBODY = 65534
WORK = "/tmp"
MOST_FILES = 200
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH, _PATH = 2, 0x200000
_PDEATHSIG, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 24, 38
_LANDLOCK = 444
_READ_FILE, _READ_DIR, _OF_FILES = 4, 8, 0xC007
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def system_folders() -> list[str]:
    """Return the folders and files that a box may read: the standard library, shared libraries and two devices."""
    wanted = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), "/lib", "/lib64", "/usr/lib"]
    wanted += ["/usr/lib64", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    real = sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)})
    # A folder comes along with the folder that contains it.
    return [path for path in real if not any(path.startswith(os.path.join(other, "")) for other in real)]


def enter_namespaces() -> None:
    """Give this process users, mounts, a network, messages and names of its own, and a root with system folders only.

    Root makes the namespaces with its own rights, and the boxes become another user later. Any other user needs a user
    namespace, and so does a root without rights, as in many containers.

    Raises:
        OSError: the system does not allow it.
    """
    kinds = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWNET
    user, group = os.geteuid(), os.getegid()
    if user or _libc.unshare(kinds):
        _call("unshare", _libc.unshare(kinds | _NEWUSER))
        _put("/proc/self/setgroups", "deny")
        _put("/proc/self/uid_map", f"{user} {user} 1")
        _put("/proc/self/gid_map", f"{group} {group} 1")
    folders = system_folders()
    links = {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}
    packages = [
        path for folder in folders for name in ("site", "dist") for path in _packages(folder, f"{name}-packages")
    ]
    _mount(None, "/", None, _REC | _PRIVATE)
    # The new root is an empty folder in memory; the old root hangs below it until the folders are mounted.
    _mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.chdir(WORK)
    os.mkdir("old")
    _call("pivot_root", _libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"old"))
    os.chdir("/")
    for path in folders:
        _show(path)
    for path in packages:
        _mount("tmpfs", path, "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4k,mode=755")
    for path, target in links.items():
        if not os.path.lexists(path):
            os.symlink(target, path)
    os.makedirs(WORK, exist_ok=True)
    _call("umount", _libc.umount2(b"/old", _DETACH))
    os.rmdir("/old")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def own_processes() -> None:
    """Let the next child be the first process of a namespace of processes. When it ends, the kernel ends all others."""
    _call("unshare", _libc.unshare(_NEWPID))


def own_folder(megabytes: int) -> None:
    """Give this process a work folder in memory that no other process sees, and that vanishes with the process."""
    _call("unshare", _libc.unshare(_NEWNS | _NEWIPC))
    options = f"size={megabytes}m,nr_inodes={MOST_FILES},mode=1777"
    _mount("tmpfs", WORK, "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    os.chdir(WORK)


def limit(seconds: float, memory: int, file_size: int, files: int, processes: int) -> None:
    """Limit CPU time, address space, the size of a file, open files, and the processes of the user.

    Args:
        seconds: of wall-clock time; the limit on CPU time is a little larger, and several threads share it.
        memory: bytes.
        file_size: bytes.
        files: open files.
        processes: processes and threads; 0 leaves them unlimited.
    """
    wanted = {"CPU": 8 * int(seconds) + 8, "AS": memory, "FSIZE": file_size, "NOFILE": files, "CORE": 0, "MSGQUEUE": 0}
    for name, amount in (wanted | ({"NPROC": processes} if processes else {})).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (amount, amount))


def drop_rights(nobody: bool) -> None:
    """Give up every capability, and never get a right again by a program.

    Args:
        nobody: whether root becomes the user nobody. Without a root of its own, nobody might not find the standard
            library.
    """
    # A user namespace without the user nobody refuses this. There, root without capabilities is an ordinary user.
    with contextlib.suppress(OSError):
        if nobody and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            # Keys and counts of processes then belong to this box, and not to all boxes of nobody.
            _libc.unshare(_NEWUSER)
    for number in range(64):
        if _libc.prctl(_CAPBSET_DROP, number, 0, 0, 0):
            break
    nothing = ctypes.create_string_buffer(24)
    _call("capset", _libc.capset(struct.pack("=II", 0x20080522, 0), nothing))
    _call("prctl", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))


def die_with_parent() -> None:
    """Be killed when the parent ends. Call this after `drop_rights`, which would undo it."""
    _call("prctl", _libc.prctl(_PDEATHSIG, 9, 0, 0, 0))


def close_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Let Landlock refuse all files but those below some folders, and where it can, TCP and signals to other boxes.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = _call("landlock", _libc.syscall(_LANDLOCK, None, 0, 1))
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = 1 + (version >= 4) + (version >= 6)
    wanted = struct.pack("=QQQ", rights, 3, 3)[: 8 * fields]
    rules = _call("landlock", _libc.syscall(_LANDLOCK, wanted, len(wanted), 0))
    for path, allowed in [(path, _READ_FILE | _READ_DIR) for path in readable] + [(path, rights) for path in writable]:
        # /dev/null is there to be written to.
        allowed = allowed if os.path.isdir(path) else rights & _OF_FILES & ~1
        place = os.open(path, _PATH | os.O_CLOEXEC)
        _call("landlock", _libc.syscall(_LANDLOCK + 1, rules, 1, struct.pack("=Qi", allowed, place), 0))
        os.close(place)
    _call("prctl", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("landlock", _libc.syscall(_LANDLOCK + 2, rules, 0))
    os.close(rules)


def filter_calls() -> None:
    """Let seccomp refuse all calls of the kernel but those in `syscalls.py`.

    Raises:
        OSError: the architecture or the kernel has no filter.
    """
    install_filter()


def counts_by_namespace() -> bool:
    """Whether the limit on processes counts the processes of the user namespace alone, or all processes of the user."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def _show(path: str) -> None:
    """Mount a folder or file of the old root at its place in the new root, for reading only."""
    source = f"/old{path}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    _mount(source, path, None, _BIND | _REC)
    # The kernel refuses a second mount that drops flags of the first one. A device must stay usable.
    kept = os.statvfs(path).f_flag & (_NOSUID | _NODEV | _NOEXEC | 1024 | 2048) | _NOSUID
    _mount(None, path, None, _REMOUNT | _BIND | _RDONLY | kept | (0 if path.startswith("/dev/") else _NODEV))


def _packages(folder: str, name: str) -> list[str]:
    found = [folder] if os.path.basename(folder) == name else []
    return found + glob.glob(os.path.join(folder, name)) + glob.glob(os.path.join(folder, "python*", name))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    names = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _call(f"mount of {target}", _libc.mount(*names, ctypes.c_ulong(flags), options.encode()))


def _put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _call(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
