"""The bash side of the persistent shell: what a shell sources, as text. Names inside the sandbox are parameters of it.

`report` says "nonce status last-pid shell-pid cwd" between two zero bytes. `dump` writes the state as a script; options come last,
for errexit would end the reading of it. `status` sets `$?`.
"""

from dataclasses import dataclass

SCRIPT_FD, MAILBOX_FD, REPORT_FD, LIBRARY_FD = 200, 201, 202, 203
UNWIND_SIGNAL, EXIT_SIGNAL = 57, 58  # SIGRTMAX-7 and -6: no program uses them

# The names the shell sets itself, or that describe this one process: not part of the state.
PRIVATE_NAMES = (
    "BASH|BASH_*|BASHOPTS|BASHPID|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTERR|PIPESTATUS|PPID|RANDOM"
    "|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|COMP_WORDBREAKS|__trsi_*"
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a shell finds its files: the text of the command, the library, and where it leaves its state."""

    command: str
    state: str
    library: str

    def library_text(self) -> str:
        """What `begin`, `report`, `dump`, `last` and `status` are, to be sourced with one of these as its first argument."""
        return rf"""case "$1" in
begin)
  exec {SCRIPT_FD}<&-
  shopt -s expand_aliases
  trap '\builtin . {self.library} dump' EXIT
  trap '\builtin return 124' {UNWIND_SIGNAL}
  trap '\builtin exit 124' {EXIT_SIGNAL} ;;
report)
  {{ \builtin read -r __trsi_last </proc/sys/kernel/ns_last_pid || \builtin . {self.library} last; }} 2>&-
  \builtin printf '\0%s %s %s %s %s\0' "$3" "$2" "$__trsi_last" "$$" "$PWD" >&{REPORT_FD}
  \builtin unset -v __trsi_last
  \builtin return "$2" ;;
last) # a kernel that does not tell the last number given out (gVisor's): the highest that lives is none of a later process
  __trsi_last=0 __trsi_flags=$-; \builtin set +f
  for __trsi_name in /proc/[0-9]*; do
    __trsi_name=${{__trsi_name#/proc/}}
    if \builtin [ "$__trsi_name" -gt "$__trsi_last" ]; then __trsi_last=$__trsi_name; fi
  done
  case "$__trsi_flags" in *f*) \builtin set -f ;; esac
  \builtin unset -v __trsi_name __trsi_flags ;;
status) \builtin return "$2" ;;
dump) # through the file and not a pipe: what is being ended at this moment may be every process but this
  {{ \builtin compgen -v >|{self.state}; \builtin mapfile -t __trsi_names <{self.state}; }} 2>&-
  {{
    \builtin printf '#state\nbuiltin cd -- %q\n' "$PWD"
    \builtin umask -p
    \builtin shopt -p
    for __trsi_name in "${{__trsi_names[@]}}"; do
      case "$__trsi_name" in
      {PRIVATE_NAMES}) ;;
      *) \builtin declare -p -- "$__trsi_name" || : ;;
      esac
    done
    \builtin declare -f
    \builtin declare -Fx
    \builtin alias -p
    \builtin set +o
    \builtin printf '#end\n'
  }} >|{self.state} 2>&-
  \builtin unset -v __trsi_names __trsi_name ;;
esac
"""

    def prologue(self) -> str:
        """What a new shell reads first: short, for it reads its script byte by byte."""
        return f". {self.library} begin\n"

    def source(self) -> str:
        """Runs the command, with the report channel closed."""
        return f"\\builtin . {self.command} {REPORT_FD}>&-\n"

    def restore(self) -> str:
        """Reads a state back, unheard."""
        return f"{{ \\builtin . {self.state}; }} >/dev/null 2>&1\n"

    def dump(self) -> str:
        return f"{{ \\builtin . {self.library} dump; }} 2>&-\n"

    def report(self, nonce: str) -> str:
        return f'{{ \\builtin . {self.library} report "$?" {nonce}; }} 2>&-\n'


def quoted(text: bytes) -> str:
    """One word of bash that means these bytes; ASCII only. Zero bytes are left out: a word cannot hold them."""
    return "$'" + "".join(_QUOTED[byte] for byte in text) + "'"


_QUOTED = [
    "" if byte == 0 else chr(byte) if 32 <= byte < 127 and chr(byte) not in "\\'" else f"\\{byte:03o}" for byte in range(256)
]
