"""The seccomp filter of a box: the calls of the kernel that Python needs for a computation, and no others.

A list of what is allowed grows old in the safe direction: a call that a newer kernel adds is refused. What is missing
here is missing for a reason. There is no `execve`, no `fork`, no `socket`, no `kill`, no `ptrace`, no `mount`, nothing
that makes a namespace, changes modes, owners, times or priorities, or keeps memory outside the limits of a process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# name, x86_64, arm64; "-" where the architecture does not have the call.
_CALLS = """
read 0 63 write 1 64 open 2 - close 3 57 stat 4 - fstat 5 80 lstat 6 - poll 7 - lseek 8 62 mmap 9 222 mprotect 10 226
munmap 11 215 brk 12 214 rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 pread64 17 67 pwrite64 18 68
readv 19 65 writev 20 66 access 21 - pipe 22 - select 23 - sched_yield 24 124 mremap 25 216 mincore 27 232
madvise 28 233 dup 32 23 dup2 33 - pause 34 - nanosleep 35 101 getitimer 36 102 alarm 37 - setitimer 38 103
getpid 39 172 sendfile 40 71 sendto 44 206 recvfrom 45 207 recvmsg 47 212 shutdown 48 210 getsockname 51 204
getpeername 52 205 setsockopt 54 208 getsockopt 55 209 exit 60 93 uname 63 160 flock 73 32 fsync 74 82 fdatasync 75 83
ftruncate 77 46 getdents 78 - getcwd 79 17 chdir 80 49 fchdir 81 50 rename 82 - mkdir 83 - rmdir 84 - creat 85 -
unlink 87 - readlink 89 - umask 95 166 gettimeofday 96 169 getrlimit 97 163 getrusage 98 165 sysinfo 99 179
times 100 153 getuid 102 174 getgid 104 176 geteuid 107 175 getegid 108 177 getppid 110 173 getpgrp 111 -
getpgid 121 155 getsid 124 156 getgroups 115 158 getresuid 118 148 getresgid 120 150 rt_sigpending 127 136
rt_sigtimedwait 128 137 rt_sigsuspend 130 133 sigaltstack 131 132 statfs 137 43 fstatfs 138 44 sched_getparam 143 121
sched_getscheduler 145 120 sched_get_priority_max 146 125 sched_get_priority_min 147 126 arch_prctl 158 -
gettid 186 178 time 201 - futex 202 98 sched_getaffinity 204 123 getdents64 217 61 set_tid_address 218 96
restart_syscall 219 128 fadvise64 221 223 clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115
exit_group 231 94 epoll_wait 232 - epoll_ctl 233 21 openat 257 56 mkdirat 258 34 newfstatat 262 79 unlinkat 263 35
renameat 264 38 readlinkat 267 78 faccessat 269 48 pselect6 270 72 ppoll 271 73 set_robust_list 273 99
get_robust_list 274 100 epoll_pwait 281 22 eventfd2 290 19 epoll_create1 291 20 dup3 292 24 pipe2 293 59 preadv 295 69
pwritev 296 70 getcpu 309 168 renameat2 316 276 getrandom 318 278 membarrier 324 283 copy_file_range 326 285
statx 332 291 rseq 334 293 close_range 436 436 faccessat2 439 439 epoll_pwait2 441 441
"""
# Only some uses of these calls are allowed. `_only` gets the position of an argument, a mask, and the allowed values.
#   clone       only threads. Without other processes there is no fork bomb, and nothing outlives the box.
#   clone3      hides its flags from a filter. The C library uses `clone` when the kernel does not have this call.
#   socketpair  only streams: a pair of datagram sockets can send to any socket that has a name.
#   fcntl       no F_SETOWN and F_SETSIG, which let the kernel send a signal to another process.
#   ioctl       nothing but modes of descriptors. Terminals can be told to read what a program writes.
#   prlimit64   only this process.
_THREAD, _UNIX, _STREAM, _KIND = 0x10000, 1, 1, 0xF
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
_IOCTL = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
_SOME = {
    "x86_64": {"clone": 56, "clone3": 435, "socketpair": 53, "fcntl": 72, "ioctl": 16, "prlimit64": 302, "tgkill": 234},
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "socketpair": 199,
        "fcntl": 25,
        "ioctl": 29,
        "prlimit64": 261,
        "tgkill": 131,
    },
}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _ATLEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2


def install_filter() -> None:
    """Filter the calls of this process, for ever. The process may raise signals only against itself.

    Raises:
        OSError: the architecture or the kernel has no filter.
    """
    code = filter_code(platform.machine(), os.getpid())
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def filter_code(machine: str, own: int) -> bytes:
    """Return the filter as a program of classic BPF, 8 bytes an instruction.

    Args:
        machine: the architecture, `x86_64` or `aarch64`.
        own: number of the process that the filter is for.

    Raises:
        OSError: another architecture.
    """
    if machine not in _AUDIT:
        raise OSError(f"seccomp: the numbers of the calls are not known for {machine}")
    words = _CALLS.split()
    numbers = [number for number in words[1 + (machine == "aarch64") :: 3] if number != "-"]
    some = _SOME[machine]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    # x86_64 has a second table of numbers, for programs with short pointers.
    code += [(_ATLEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for number in numbers:
        code += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 1, some["clone3"]), (_RETURN, 0, 0, _ENOSYS)]
    code += _only(some["clone"], [(0, _THREAD, (_THREAD,))])
    code += _only(some["socketpair"], [(0, 0xFFFFFFFF, (_UNIX,)), (1, _KIND, (_STREAM,))])
    code += _only(some["fcntl"], [(1, 0xFFFFFFFF, _FCNTL)])
    code += _only(some["ioctl"], [(1, 0xFFFFFFFF, _IOCTL)])
    code += _only(some["prlimit64"], [(0, 0xFFFFFFFF, (0, own))])
    code += _only(some["tgkill"], [(0, 0xFFFFFFFF, (own,))])
    code.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _only(number: int, conditions: list[tuple[int, int, tuple[int, ...]]]) -> list[tuple[int, int, int, int]]:
    """Return code that allows a call if each argument has one of its values, and else refuses the call."""
    inner: list[tuple[int, int, int, int]] = []
    for position, mask, values in conditions:
        # The arguments have 64 bits and begin at byte 16. The kernel reads the lower half of all arguments used here.
        inner += [(_LOAD, 0, 0, 16 + 8 * position), (_AND, 0, 0, mask)]
        inner += [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        inner.append((_RETURN, 0, 0, _EPERM))
    inner.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(inner), number), *inner]
