"""Process 1 of a gVisor sandbox, and what its owner asks of it.

A static BusyBox shell begins the agent's shells and ends processes. Owner and process 1 speak through four named pipes of the host,
which gVisor opens for the sandbox (`--host-fifo=open`): so no program of the sandbox holds a descriptor that a checkpoint could not
keep. BusyBox lies in a read-only mount: an agent that replaces `bash`, `tar` or the C library changes nothing here. The agent is
root and may write to these pipes: what a verdict depends on is asked of gVisor itself (`runsc ps`).
"""

import asyncio
import contextlib
import os
import shlex
import string
from pathlib import Path

from termrsi.errors import SandboxError, SandboxSpoiled
from termrsi.sandbox.stream_wire import LAUNCH, READ_BYTES

MESSAGE_BYTES, DRAINS = 4096, 64
ANSWER_S = 30.0  # of a process 1 that lives, however loaded its machine
PIPES = ("in", "out", "ctl", "reply")
PLACE = "/.termrsi"
BUSYBOX = f"{PLACE}/busybox"
PLAIN = frozenset(string.ascii_letters + string.digits + "/._-")
# All that would end or stop process 1, but for KILL and STOP. Not CHLD: ignoring it makes BusyBox's `read` fail.
SIGNALS = "HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM TSTP TTIN TTOU XCPU XFSZ VTALRM PROF SYS"
SCRIPT = rf"""exec 6>{PLACE}/reply 7<{PLACE}/ctl 8<{PLACE}/in 9>{PLACE}/out </dev/null >/dev/null 2>&1 || exit 1
trap '' {SIGNALS}
runner=0
# gVisor up to 2022 refuses AT_NO_AUTOMOUNT, which coreutils sets in these two programs, and only there.
/usr/bin/stat / || for path in /bin/ls /bin/stat /usr/bin/ls /usr/bin/stat; do
  [ ! -x $path ] || {BUSYBOX} ln -sf {BUSYBOX} $path
done
living() {{ # numbers of the processes above $1, but $2 and ours
  living=
  for entry in /proc/[0-9]*; do
    pid=${{entry#/proc/}}
    case $pid in 1 | $2 | $runner) continue ;; esac
    [ $pid -gt $1 ] || continue
    IFS= read -r line <$entry/stat || continue
    case ${{line##*) }} in [ZX]*) continue ;; esac
    living="$living $pid"
  done
}}
named() {{ # in a child: signals as a program expects them, and the path in clear
  trap - {SIGNALS}
  path=$(printf '%b.' "$path"); path=${{path%.}}
}}
now() {{ IFS=. read -r now line </proc/uptime; }}
while :; do
  read -r verb nonce shell last seconds signal path <&7 || exit 1
  jobs # collects the children that process 1 was given meanwhile
  case $shell$last$seconds$signal in *[!0-9]* | '') continue ;; esac
  case $verb in
  ping) printf '\n%s\n' "$nonce ok" >&6 ;;
  mkdir) (named; {BUSYBOX} mkdir -p -- "$path"; printf '\n%s\n' "$nonce $?" >&6) & ;;
  shell)
    (
      named
      cd -- "$path" || cd /
      /bin/bash --norc --noprofile -c {shlex.quote(LAUNCH)} <&8 >&9 6>&- 7>&- 8>&- 9>&-
      printf '\1%s end %s\1' "$nonce" $? >&9
    ) &
    runner=$! ;;
  some)
    [ $signal = 0 ] || kill -$signal $shell
    now; end=$((now + seconds))
    while living $last $shell; [ -n "$living" ] && now && [ $now -le $end ]; do kill -9 $living; done
    printf '\n%s\n' "$nonce ${{living:-gone}}" >&6 ;;
  all)
    living 1 $shell; set -- $living
    runner=0; now; end=$((now + seconds))
    while kill -9 -1; jobs; living 1 0; [ -n "$living" ] && now && [ $now -le $end ]; do :; done
    jobs # what died since: gVisor counts the dead that nobody has asked for
    printf '\n%s\n' "$nonce $#" >&6 ;;
  esac
done
"""


class Keeper:
    """The owner's end of the pipes in `directory`. One event loop."""

    def __init__(self, directory: Path) -> None:
        self._fds: dict[str, int] = {}
        for name in PIPES:
            os.mkfifo(directory / name, 0o600)
            # Held open both ways: no end of a pipe is ever without its other end, and opening one never blocks.
            self._fds[name] = os.open(directory / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = asyncio.Lock()
        self._awaited: asyncio.Future[str] | None = None
        self._lost: SandboxError | None = None

    async def ask(
        self,
        verb: str,
        *,
        shell: int = 0,
        last: int = 0,
        seconds: float = 0.0,
        signal: int = 0,
        path: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """What process 1 answers. Raises SandboxError if it does not within `timeout_s` (None: ANSWER_S)."""
        timeout_s = ANSWER_S if timeout_s is None else timeout_s
        async with self._lock:
            if self._lost is not None:
                raise type(self._lost)(*self._lost.args)
            nonce = os.urandom(8).hex()
            loop = asyncio.get_running_loop()
            answered = self._awaited = loop.create_future()
            held = bytearray()
            self._drain("reply")  # what the agent may have written there

            def on_readable() -> None:
                with contextlib.suppress(BlockingIOError):
                    held.extend(os.read(self._fds["reply"], READ_BYTES))
                *lines, rest = bytes(held).split(b"\n")
                held[:] = rest[-MESSAGE_BYTES:]
                for line in lines:
                    if line.startswith(nonce.encode() + b" ") and not answered.done():
                        answered.set_result(line.partition(b" ")[2].decode("ascii", "replace"))

            loop.add_reader(self._fds["reply"], on_readable)
            try:
                self._say(verb, nonce, shell, last, seconds, signal, path)
                async with asyncio.timeout(timeout_s):
                    return await answered
            except TimeoutError as error:
                raise SandboxError(f"process 1 did not answer {verb} within {timeout_s:.0f} s", "sandbox.gvisor") from error
            finally:
                self._awaited = None
                if "reply" in self._fds:
                    loop.remove_reader(self._fds["reply"])

    def lose(self, why: str, *, spoiled: bool = False) -> None:
        """Nobody answers any more: who waits, and whoever asks later, gets SandboxError, or SandboxSpoiled, at once."""
        if self._lost is None:
            self._lost = (SandboxSpoiled if spoiled else SandboxError)(f"lost: {why}", "sandbox.gvisor")
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(type(self._lost)(*self._lost.args))

    def begin_shell(self, cwd: str) -> "ShellStream":
        """A new bash in `cwd`; what was left in the pipes of the one before goes unread."""
        self._drain("in")
        self._drain("out")
        nonce = os.urandom(8).hex()
        self._say("shell", nonce, path=cwd)
        return ShellStream(self._fds["in"], self._fds["out"], nonce)

    def joined(self, nonce: str) -> "ShellStream":
        """The stream of a shell that runs already, begun under `nonce`."""
        return ShellStream(self._fds["in"], self._fds["out"], nonce)

    def close(self) -> None:
        """As often as one likes. Who waits for an answer gets SandboxError.

        A number that is closed while the loop still watches it would be deaf for whoever is given it next.
        """
        if self._awaited is not None:
            asyncio.get_running_loop().remove_reader(self._fds["reply"])
            if not self._awaited.done():
                self._awaited.set_exception(SandboxError("closed", "sandbox.gvisor"))
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _drain(self, name: str) -> None:
        """Bounded: the agent may write as fast as this reads."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(DRAINS):
                os.read(self._fds[name], READ_BYTES)

    def _say(
        self, verb: str, nonce: str, shell: int = 0, last: int = 0, seconds: float = 0.0, signal: int = 0, path: str = ""
    ) -> None:
        escaped = "".join(chr(byte) if chr(byte) in PLAIN else f"\\0{byte:03o}" for byte in os.fsencode(path))
        try:
            os.write(self._fds["ctl"], f"\n{verb} {nonce} {shell} {last} {int(seconds) + 1} {signal} {escaped}\n".encode())
        except (KeyError, BlockingIOError) as error:
            raise SandboxError("process 1 does not listen", "sandbox.gvisor") from error


class ShellStream:
    """Implements `stream_wire.Stream`: a named pipe each way. Process 1 says how bash ended, under a nonce."""

    def __init__(self, into: int, out: int, nonce: str) -> None:
        self._into = into
        self._out = out
        self.nonce = nonce
        # Not begun as a report ends: what could be the beginning of a mark is held back until more comes.
        self._mark = f"\1{nonce} end ".encode()
        self._held = b""
        self._status: int | None = None

    def fileno(self) -> int:
        return self._out

    def read(self) -> bytes | None:
        if self._status is not None:
            return b""
        try:
            data = self._held + os.read(self._out, READ_BYTES)
        except BlockingIOError:
            return None
        self._held = b""
        at = data.find(self._mark)
        if at >= 0:
            number, found, _ = data[at + len(self._mark) :].partition(b"\1")
            if found:
                self._status = int(number) if number.isdigit() else 137
            else:
                self._held = data[at:]
            return data[:at] or (b"" if found else None)
        keep = next((n for n in range(min(len(self._mark) - 1, len(data)), 0, -1) if data.endswith(self._mark[:n])), 0)
        self._held, data = data[len(data) - keep :], data[: len(data) - keep]
        return data or None

    async def write(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            try:
                data = data[os.write(self._into, data) :]
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(self._into, _set, writable)
                try:
                    await writable
                finally:
                    loop.remove_writer(self._into)

    async def status(self) -> int:
        return 137 if self._status is None else self._status

    def close(self) -> None:
        """The pipes are the sandbox's, for its next shell."""


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
