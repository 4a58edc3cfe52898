"""A terminal inside a sandbox, typed into by keystrokes: bash behind util-linux's `script`, which gives it a pseudo-terminal.

Needs nothing but bash and `script`, which every Debian has. A wait ends with the shell's next prompt, and at the latest with its
time: what runs on then goes on, as in a terminal. Snapshots do not keep it where they keep no processes: it is begun anew.
"""

import re
import shlex
from collections.abc import Sequence

from termrsi.harness.actions import Command
from termrsi.harness.parse_terminus import is_key
from termrsi.ports import Sandbox
from termrsi.records import CommandResult

PLACE = "/tmp/.termrsi-terminal"
ROWS, COLUMNS = 40, 160
SETTLE_S = 0.1  # several lines at once give several prompts: the next of them follows within this
START_S = 10.0
SHOWN_S = 2.0  # bash tells of a prompt just before it shows it: for so long the log may take to have it
SHOWN_STEP_S = 0.02
_KEYS = {
    "Enter": "\r",
    "Escape": "\x1b",
    "Tab": "\t",
    "Space": " ",
    "BSpace": "\x7f",
    "Up": "\x1b[A",
    "Down": "\x1b[B",
    "Right": "\x1b[C",
    "Left": "\x1b[D",
    "Home": "\x1b[H",
    "End": "\x1b[F",
    "PPage": "\x1b[5~",
    "NPage": "\x1b[6~",
    "DC": "\x1b[3~",
}
# Control sequences of an xterm. One that sets the cursor begins a line: what a full-screen program draws is read line by line.
_CURSOR = re.compile(r"\x1b\[\d*(?:;\d*)?[Hf]")
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[PX^_].*?\x1b\\|\x1b[()][0-9A-Za-z]|\x1b[ -~]", re.DOTALL
)
_BEGUN = re.compile(r"^Script started on [^\n]*\n")  # what `script` says of itself
_DONE = re.compile(r"\n*Script done on [^\n]*\n?$")
# Run in a subshell, so that nothing of it is left in the sandbox's own shell. Both pipes are opened for reading and writing by who
# holds them: neither end is ever without the other. `setsid --fork`, and not `&`, behind which SIGINT would be ignored for good.
_BEGIN = rf"""command -v script > /dev/null || {{ echo "no program script (of util-linux)"; exit 1; }}
mkdir -p {PLACE} && cd {PLACE} || exit 1
if [ -s pid ] && kill -0 "$(<pid)" 2>/dev/null; then exec 7<>keys 8<>prompt
else
  rm -f keys prompt log pid; mkfifo keys prompt && exec 7<>keys 8<>prompt || exit 1
  cat > rc <<'END'
PS1='\u@\h:\w$ '
exec 8<>{PLACE}/prompt
PROMPT_COMMAND='[[ $PS1 == *termrsi* ]] || PS1+="\[\e]termrsi\a\]"; printf x >&8'
stty rows {ROWS} cols {COLUMNS}
bind "set enable-bracketed-paste off"
cd "$TERMRSI_START"
END
  TERMRSI_START=$start TERM=xterm setsid --fork script -q -f \
    -c 'echo $$ > {PLACE}/pid; exec bash --noprofile --rcfile {PLACE}/rc -i' log <&7 7>&- 8>&- >/dev/null 2>&1
  read -r -N 1 -t {START_S:g} -u 8 || {{ cat log; exit 1; }}
  seen=0 new=1 prompts=1
  shown
fi"""
# Waits until the log shows as many prompts as were told of. Keys that come before bash has shown its prompt are echoed twice.
_SHOWN = rf"""shown() {{
  local turns={SHOWN_S / SHOWN_STEP_S:.0f}
  while (( turns-- )) && (( $(tail -c +$((seen + 1)) log | grep -acF $'\e]termrsi\a') < prompts )); do
    if read -r -N 1 -t {SHOWN_STEP_S:g} -u 8; then (( ++prompts )); fi
  done
}}"""


class Terminal:
    """Lives in one sandbox; begun by the first `send` where its shell stands, and again if what ran in it ended it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._seen = 0  # bytes of the log

    async def send(self, commands: Sequence[Command]) -> CommandResult:
        """Types them one after the other; what the terminal printed since the last time. Raises SandboxError."""
        output, seconds = "", 0.0
        for command in commands or (Command("", 0.0),):
            wait_s = 1.0 if command.wait_s is None else command.wait_s
            result = await self._sandbox.run(self._script(typed(command.text), wait_s), wait_s + 2 * START_S)
            seconds += result.duration_s
            head, _, rest = result.output.partition("\n")
            end, _, new = head.partition(" ")
            if result.exit_code != 0 or not end.isdigit():
                return CommandResult(result.exit_code or 1, f"the terminal could not be begun: {result.output}", duration_s=seconds)
            self._seen = int(end)
            output += _BEGUN.sub("", rest) if new == "1" else rest
        return CommandResult(0, plain(output), duration_s=seconds)

    def _script(self, keys: str, wait_s: float) -> str:
        return f"""(
start=$PWD seen={self._seen} new=0 prompts=0
{_SHOWN}
{_BEGIN}
while read -r -N 1 -t 0.001 -u 8; do :; done # prompts of before
printf %s {shlex.quote(keys)} >&7
if read -r -N 1 -t {wait_s:g} -u 8; then
  (( ++prompts ))
  while read -r -N 1 -t {SETTLE_S:g} -u 8; do (( ++prompts )); done
  shown
fi
end=$(stat -c %s log)
echo "$end $new"
tail -c +$((seen + 1)) log | head -c $((end - seen))
)"""


def typed(keystrokes: str) -> str:
    """What a keyboard would send: one named key, or text whose line ends are the Enter key."""
    if is_key(keystrokes):
        return _KEYS.get(keystrokes) or chr(ord(keystrokes[-1].upper()) & 0x1F if keystrokes[-1] != "?" else 0x7F)
    return keystrokes.replace("\r\n", "\r").replace("\n", "\r")


def plain(output: str) -> str:
    """What can be read of a terminal's output: without control sequences, one line end, a line written over as it was last."""
    text = _CONTROL.sub("", _CURSOR.sub("\n", _DONE.sub("", output))).replace("\r\n", "\n")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip(" ") for line in text.split("\n")]
    last = " " if text.endswith(" ") else ""  # of a prompt
    return "".join(sign for sign in "\n".join(lines) + last if sign in "\n\t" or sign.isprintable())
