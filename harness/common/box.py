"""A box for a process: the files and the network that the kernel leaves it, by Landlock (Linux 5.13 or later; landlock(7)).

What is not allowed is denied, to the process, to all that it starts, and for good. No privileges are needed. Where the kernel has no
Landlock there is no box: `version` says so.
"""

import ctypes
import os
import stat
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(6, 16))
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # what a rule about a file may hold
READ = EXECUTE | READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE | IOCTL_DEV
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # what a version of Landlock watches over, from it on
TCP = 3  # bind and connect, from version 4 on
SCOPES = 3  # abstract sockets of others, signals to others, from version 6 on


def version():
    """Landlock's version in this kernel; 0 without it, or where it is switched off."""
    return max(0, LIBC.syscall(CREATE_RULESET, None, 0, 1))


def _call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def enter(rules):
    """Restrict this process to `rules`, (path, access) each: access to a file, or to a folder and all beneath it. What is not there is
    left out. No TCP, and no signals or abstract sockets out of the box, where the kernel knows how. OSError without Landlock."""
    has = version()
    if not has:
        raise OSError("this kernel has no Landlock")
    files = FILES[max(v for v in FILES if v <= has)]
    attributes = struct.pack("=QQQ", files, TCP, SCOPES)[: 8 if has < 4 else 16 if has < 6 else 24]
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    for path, access in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = access & files & (-1 if stat.S_ISDIR(os.fstat(descriptor).st_mode) else OF_FILES)
        if allowed:
            _call(ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    if LIBC.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
