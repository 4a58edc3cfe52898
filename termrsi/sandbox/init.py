# Runs before anything else is imported, and its start is counted in milliseconds:
# ruff: noqa: PTH101, PTH102, PTH106, PTH110, PTH112, PTH115, PTH116, PTH208, PTH211
"""The helper process that makes local sandboxes, and process 1 inside each of them. Standard library only.

Run as a script (`python -I -S init.py FD`); the package imports only `listening`. The helper ("zygote") is small and has one
thread, so it may fork; the process that uses sandboxes has many and may not. It receives one request per sandbox on a
SEQPACKET socket and forks into new namespaces; the child, process 1 of its PID namespace, mounts and drops capabilities.
Forking a warm interpreter and calling mount(2) directly takes about 5 ms; the same set-up out of unshare,
mount, pivot_root and setpriv took 45 ms, nearly all of it program starts.

Process 1 serves its own control socket. It ends, and with it the whole namespace, when that socket is closed: the death
of the owner needs no other signal.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC, RDONLY, REMOUNT, BIND, REC, PRIVATE = 2, 4, 8, 1, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SYS_RESOURCE = 24
KEYCTL_JOIN_SESSION_KEYRING = 1
_NAMES = ["clone", "pivot_root", "unshare", "add_key", "request_key", "keyctl", "bpf", "userfaultfd", "perf_event_open"]
_NEW = {"io_uring_setup": 425, "clone3": 435}  # the same on every architecture
SYSCALLS = {
    "x86_64": dict(zip(_NAMES, (56, 155, 272, 248, 249, 250, 321, 323, 298), strict=True)) | _NEW,
    "aarch64": dict(zip(_NAMES, (220, 41, 97, 217, 218, 219, 280, 282, 241), strict=True)) | _NEW,
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
# Not there at all: kernel attack surface, and clone3, whose flags lie where a filter cannot look; libraries do without.
ABSENT = ("clone3", "io_uring_setup", "add_key", "request_key", "keyctl", "bpf", "userfaultfd", "perf_event_open")
# chown, dac_override, dac_read_search, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, audit_write, setfcap
KEPT_CAPABILITIES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 29, 31)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
READ_ONLY_PROC = ("sys", "irq", "bus", "fs", "sysrq-trigger", "acpi", "scsi")
HIDDEN_PROC = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug")
MESSAGE_BYTES = 1 << 17
LINGER_S = 10.0
MAX_PORTS = 16  # told of one process
# A file costs the kernel about 1 KiB that counts as the sandbox's memory and that no process's end gives back: with as many as the
# layer's own pages, empty ones fill no more than the disk's share of it.
INODES_PER_MB = 256
LIBC = ctypes.CDLL(None, use_errno=True)
Request = dict[str, Any]  # Any: parsed JSON, from the owner only
Reply = dict[str, object]


def check(result: int, what: str) -> None:
    """Raises OSError with the call's errno if it failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    check(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {kind or 'bind'} {target}")


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """(message, file descriptors); (None, []) at the end of the stream."""
    ints = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(16 * ints.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            ints.frombytes(payload[: len(payload) - len(payload) % ints.itemsize])
    return (json.loads(data) if data else None), list(ints)


def send(sock: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], ancillary)


def wake_on_child() -> int:
    """A descriptor that becomes readable whenever a child ends."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end


def drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


# --- the helper ---------------------------------------------------------------------------------------------------


def helper(sock: socket.socket) -> None:
    """Waits for requests and for the end of children. Ends when the owner's socket closes, or unused for LINGER_S."""
    if os.uname().machine in SYSCALLS:
        syscall_filter()
    last_capability()
    gc.freeze()  # a collection in a child would write to every page that it shares with this process
    wake = wake_on_child()
    cgroups: set[str] = set()  # removed by the owner; by us if it was killed
    serving = owner = True
    busy = False
    while serving or busy:
        ready, _, _ = select.select([wake, sock] if serving else [wake], [], [], None if busy or not serving else LINGER_S)
        drain(wake)
        if not ready:
            # From here on requests fail on the owner's side, and it starts another helper; what came before is still read.
            sock.shutdown(socket.SHUT_RD)
            while serve_one(sock, wake, cgroups):
                pass
            serving = False
        elif sock in ready:
            serving = owner = serve_one(sock, wake, cgroups)
        busy = reap_helper()
    for path in () if owner else cgroups:
        with contextlib.suppress(OSError):
            os.rmdir(path)


def serve_one(sock: socket.socket, wake: int, cgroups: set[str]) -> bool:
    """Starts the sandbox that the next message asks for; False at the end of the stream."""
    try:
        request, fds = receive(sock)
    except ConnectionResetError:
        return False
    if request is None:
        return False
    cgroups.intersection_update([path for path in cgroups if os.path.exists(path)])
    cgroups.update(request["cgroups"])
    launch(request, fds[0], wake, sock)
    return True


def reap_helper() -> bool:
    """Whether there are children left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def launch(request: Request, control_fd: int, wake: int, sock: socket.socket) -> None:
    """Forks what becomes process 1 of a new sandbox, and does not wait: several are made at the same time."""
    user, group = os.geteuid(), os.getegid()
    with socket.socket(fileno=control_fd) as control:
        try:
            pid = fork_into_namespaces(network=request["network"])
        except OSError as error:
            send(control, {"error": str(error)})
            return
        if pid != 0:
            return
        status = 1
        try:
            sock.close()
            os.close(wake)
            os.close(signal.set_wakeup_fd(-1))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            first_main(request, control, user, group)
            status = 0
        finally:
            os._exit(status)


def fork_into_namespaces(*, network: bool) -> int:
    """As fork(2), but the child has namespaces of its own, and is process 1 of one. Raises OSError.

    One clone(2) instead of fork, unshare and fork again: half the page faults, which are what a start costs. What Python does
    around its own fork is for programs of several threads or with asynchronous state: this one has neither.
    """
    flags = signal.SIGCHLD | NEW_NS | NEW_UTS | NEW_IPC | NEW_PID
    flags |= (0 if network else NEW_NET) | (NEW_USER if os.geteuid() != 0 else 0)
    return syscall("clone", ctypes.c_ulong(flags), None, None, None, None)


# --- process 1 of a sandbox ---------------------------------------------------------------------------------------


def first_main(request: Request, control: socket.socket, user: int, group: int) -> None:
    """`user` and `group` are the helper's: a new user namespace knows none until they are mapped."""
    try:
        for path in request["cgroups"]:
            write(f"{path}/cgroup.procs", "0")
        if user != 0:
            write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"0 {user} 1")
            write("/proc/self/gid_map", f"0 {group} 1")
        os.umask(0o022)
        os.setsid()
        root_fd, upper_fd = build_root(request)
        if not request["network"]:
            loopback_up()
        socket.sethostname("sandbox")
        limit_resources(request)
        drop_privileges()
    except Exception as error:  # noqa: BLE001 of whatever kind: it is told, where a death would have no words
        send(control, {"error": str(error) or type(error).__name__})
        return
    send(control, {"ready": 1}, [root_fd, upper_fd])
    os.close(root_fd)
    os.close(upper_fd)
    First(control).serve()


def build_root(request: Request) -> tuple[int, int]:
    """Mounts everything and pivots into it. Returns descriptors of the new root and of the writable layer's directory."""
    check(LIBC.mount(b"none", b"/", None, REC | PRIVATE, None), "make mounts private")
    base = request["base"]
    mount(
        "termrsi",
        base,
        "tmpfs",
        NOSUID | NODEV,
        f"size={request['disk_mb']}m,nr_inodes={request['disk_mb'] * INODES_PER_MB},mode=0700",
    )
    base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    base = f"/proc/self/fd/{base_fd}"
    for name in ("root", "upper", "work"):
        os.mkdir(f"{base}/{name}")
    for part in request["parts"]:
        mount_part(base, part, request["overlay_options"])
    mount_system(f"{base}/root")
    upper_fd = os.open(f"{base}/upper", os.O_RDONLY | os.O_DIRECTORY)
    os.chdir(f"{base}/root")
    syscall("pivot_root", b".", b".")  # the old root is stacked on the new one, and detached next
    check(LIBC.umount2(b".", DETACH), "detach the host's root")
    os.chdir("/")
    os.close(base_fd)
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY), upper_fd


def mount_part(base: str, part: Request, options: str) -> None:
    """One overlay: `lowers` top first, mounted at `target` ("" is the root itself). Top directory as the first lower's."""
    name, target = part["name"], f"{base}/root/{part['target']}"
    upper, work = f"{base}/upper/{name}", f"{base}/work/{name}"
    # Short names by descriptor: mount(2) takes one page of options, less than 40 full paths.
    fds = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in part["lowers"]]
    os.mkdir(upper)
    os.mkdir(work)
    top = os.fstat(fds[0])
    os.chmod(upper, stat.S_IMODE(top.st_mode))
    with contextlib.suppress(OSError):  # an owner that has no number in this user namespace
        os.chown(upper, top.st_uid, top.st_gid)
    os.utime(upper, ns=(top.st_atime_ns, top.st_mtime_ns))
    lowers = ":".join(f"/proc/self/fd/{fd}" for fd in fds)
    mount("termrsi", target, "overlay", NODEV, f"lowerdir={lowers},upperdir={upper},workdir={work}{options}")
    for fd in fds:
        os.close(fd)


def mount_system(root: str) -> None:
    """/proc of the new PID namespace, with what reaches the host read-only or hidden, and a minimal /dev."""
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    dev = f"{root}/dev"
    mount("dev", dev, "tmpfs", NOSUID | NOEXEC, "size=64m,mode=0755,nr_inodes=4096")
    for name in DEVICES:
        make_device(name, f"{dev}/{name}")
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    os.chmod(f"{dev}/shm", 0o1777)
    os.mkdir(f"{dev}/pts")
    mount("devpts", f"{dev}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    for name in READ_ONLY_PROC:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            mount(path, path, "", BIND | REC)
            mount("", path, "", BIND | REMOUNT | RDONLY | NOSUID | NODEV | NOEXEC)
    for name in HIDDEN_PROC:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            mount(f"{dev}/null", path, "", BIND)


def make_device(name: str, target: str) -> None:
    """A node of the sandbox's own: root inside may change its owner and mode, and those of the host's are the host's."""
    theirs = os.stat(f"/dev/{name}")
    try:
        os.mknod(target, theirs.st_mode, theirs.st_rdev)
        os.chmod(target, 0o666)
    except PermissionError:  # in a user namespace, where the host's can be shown: its inode is not this user's to change
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        mount(f"/dev/{name}", target, "", BIND)
        mount("", target, "", BIND | REMOUNT | RDONLY | NOSUID | NOEXEC)  # of the inode: a device is written to all the same


def loopback_up() -> None:
    request = struct.pack("16sH22x", b"lo", 0x1 | 0x40)  # struct ifreq: up, running
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock.fileno(), 0x8914, request)  # SIOCSIFFLAGS


def limit_resources(request: Request) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    limited = request["limited"]  # by a control group; where one is missing, the next best
    if "pids" not in limited:
        resource.setrlimit(resource.RLIMIT_NPROC, (request["pids"], request["pids"]))
    if "memory" not in limited:
        limit = request["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    spare("-1000")


def spare(score: str) -> None:
    """How much the kernel spares this process where memory is short, and the least that its children may ask for."""
    with contextlib.suppress(OSError):  # lowering it takes a capability of the host
        write("/proc/self/oom_score_adj", score)


def write(path: str, text: str) -> None:
    """Raises OSError. (pathlib's own costs five more calls.)"""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def drop_privileges() -> None:
    """Capabilities that reach past the sandbox are gone from process 1 before any file of the sandbox is executed.

    It alone keeps CAP_SYS_RESOURCE, outside of the bounding set: see `do_shell`.
    """
    with contextlib.suppress(OSError):  # a kernel without keys
        syscall("keyctl", KEYCTL_JOIN_SESSION_KEYRING, None)
    last = last_capability()
    kept = [c for c in KEPT_CAPABILITIES if c <= last]
    for capability in range(last + 1):
        if capability not in kept:
            check(LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "drop a capability")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    held = int(Path("/proc/self/status").read_text().partition("CapPrm:")[2].split()[0], 16)
    low = held & sum(1 << c for c in (*kept, SYS_RESOURCE))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0)  # effective, permitted, inheritable; twice 32 bits
    check(LIBC.capset(header, data), "capset")
    check(LIBC.prctl(PR_SET_SECCOMP, 2, syscall_filter()[1], 0, 0), "seccomp")
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # no process of the sandbox may look into this one


@functools.cache
def last_capability() -> int:
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text())


@functools.cache  # the helper's, made before any sandbox
def syscall_filter() -> tuple[object, object]:
    """A seccomp program for process 1 and all after it: its lines, and the struct that points to them.

    No user namespace inside, which would bring back every capability and, with cgroup v1, the sandbox's own limits to mount and to
    lift; and what is `ABSENT`.
    """
    machine = os.uname().machine
    numbers = SYSCALLS[machine]
    load, equal, at_least, has_bits, done = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, absent, allow = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (done, 0, 0, absent), (load, 0, 0, 0)]
    if machine == "x86_64":
        program += [(at_least, 0, 1, X32_BIT), (done, 0, 0, absent)]
    for name in ABSENT:
        program += [(equal, 0, 1, numbers[name]), (done, 0, 0, absent)]
    for name in ("unshare", "clone"):  # the flags are the first argument
        flags = [(load, 0, 0, 16), (has_bits, 0, 1, NEW_USER), (done, 0, 0, refuse), (done, 0, 0, allow)]
        program += [(equal, 0, len(flags), numbers[name]), *flags]
    program.append((done, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(lines))  # struct sock_fprog
    return lines, whole


def syscall(name: str, *arguments: object) -> int:
    """Raises OSError."""
    number = SYSCALLS.get(os.uname().machine, {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: no number known for {os.uname().machine}")
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


class First:
    """Serves the control socket: starts shells, ends processes, reaps. One request, one reply; `exit` comes unasked."""

    def __init__(self, control: socket.socket) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own handler would let the agent end process 1
        self.control = control
        self.wake = wake_on_child()
        self.null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # now: the agent may put something else in its place
        self.shell = 0
        self.status: int | None = None

    def serve(self) -> None:
        """Waits for requests and for children; ends when the owner closes the socket."""
        while True:
            ready, _, _ = select.select([self.wake, self.control], [], [])
            drain(self.wake)
            self.reap()
            if self.control in ready:
                request, fds = receive(self.control)
                if request is None:
                    return
                send(self.control, getattr(self, "do_" + request["op"])(request, fds))
            self.report_exit()

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.shell:
                    self.status = os.waitstatus_to_exitcode(status)

    def report_exit(self) -> None:
        if self.status is not None:
            send(self.control, {"exit": self.status if self.status >= 0 else 128 - self.status})
            self.shell, self.status = 0, None

    def do_shell(self, request: Request, fds: list[int]) -> Reply:
        """Starts a shell on the descriptors given: `numbers[i]` in the shell is `fds[i]`; standard input is /dev/null."""
        try:
            pid = self.spawned(request, fds)
        except OSError:  # the agent's processes fill the limit: it is their end, not the sandbox's
            self.kill_until_gone(lambda: [p for p, _, _ in processes() if p != 1], 5.0, everything=True)
            pid = self.spawned(request, fds)
        for fd in fds:
            os.close(fd)
        self.shell = pid
        if pid == 0:
            self.status = 127
        return {"shell": pid}

    def spawned(self, request: Request, fds: list[int]) -> int:
        """The number of a bash on the descriptors given; 0 if there is none that can be run. Raises OSError at the limit of
        processes or memory.

        posix_spawn: a copy of this interpreter would cost more than bash's own start. In a process group of its own, for a session
        of its own is not to be had from every Python's posix_spawn, and needs none: this process has no terminal.
        """
        actions = [(os.POSIX_SPAWN_DUP2, self.null, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in zip(request["numbers"], fds, strict=True)]
        os.chdir(request["cwd"] if os.path.isdir(request["cwd"]) else "/")
        # With CAP_SYS_RESOURCE, which ends at exec, this is also the lowest that the sandbox may set: else it could spare itself,
        # and at its limit nothing would be left to kill.
        spare("0")
        try:
            # Whatever the owner or Python ignored is not ignored there.
            signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
            return os.posix_spawn(
                "/bin/bash", request["argv"], request["env"], file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=signals
            )
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise
            return 0
        finally:
            spare("-1000")
            os.chdir("/")

    def do_signal(self, request: Request, _fds: list[int]) -> Reply:
        if self.shell:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.shell, request["signal"])
        return {}

    def do_list(self, _request: Request, _fds: list[int]) -> Reply:
        names = []
        for pid, _, _ in processes():
            if pid not in (1, self.shell):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()[:200].replace(b"\0", b" ").decode(errors="replace").strip()
                    names.append(line + listening(pid))
        return {"processes": names[:64]}

    def do_kill_since(self, request: Request, _fds: list[int]) -> Reply:
        """Ends every process begun after the one numbered `last` or after clock tick `tick`, save the shell."""

        def newer() -> list[int]:
            return [p for p, tick, _ in processes() if p not in (1, self.shell) and (p > request["last"] or tick > request["tick"])]

        count, gone = self.kill_until_gone(newer, request["give_up_s"])
        return {"killed": count, "gone": gone}

    def do_kill_all(self, _request: Request, _fds: list[int]) -> Reply:
        def others() -> list[int]:
            return [p for p, _, _ in processes() if p != 1]

        shells = 1 if self.shell else 0
        count, gone = self.kill_until_gone(others, 5.0, everything=True)
        self.shell, self.status = 0, None
        return {"killed": max(count - shells, 0), "gone": gone}

    def kill_until_gone(self, find: Callable[[], list[int]], give_up_s: float, *, everything: bool = False) -> tuple[int, bool]:
        """(how many were there, whether all are gone). Repeats: a process may fork while it is being looked for.

        `everything`: all at once, by the kernel, whom no fork outruns; `find` only counts.
        """
        seen: set[int] = set()
        give_up = time.monotonic() + give_up_s
        while victims := find():
            seen.update(victims)
            for pid in (-1,) if everything else victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self.wake], [], [], 0.002)  # woken by the end of a child; a grandchild's shows on the next look
            drain(self.wake)
            self.reap()
            if time.monotonic() > give_up:
                return len(seen), False
        return len(seen), True


def processes() -> list[tuple[int, int, bytes]]:
    """(pid, start in clock ticks since boot, state) of all live processes."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found.append((int(name), int(fields[19]), fields[0]))
    return found


def listening(pid: int) -> str:
    """Where a process listens, as words to put behind its command line; "" if nowhere, or if that cannot be seen."""
    sockets = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    ports = set()
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):  # listening; for UDP: bound
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and f"socket:[{fields[9]}]" in sockets:
                    ports.add(f"{kind[:3]} {int(fields[1].rpartition(':')[2], 16)}")
    shown = [*sorted(ports)[:MAX_PORTS], *(["..."] if len(ports) > MAX_PORTS else [])]
    return f" (listening: {', '.join(shown)})" if ports else ""


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    if os.fork() != 0:  # not a child of the owner: nothing for it to wait for, no zombie if it never does
        os._exit(0)
    os.setsid()
    helper(sock)


if __name__ == "__main__":
    main()
