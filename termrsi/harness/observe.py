"""What an agent sees of what it ran: the wordings of the harnesses, and how much of an output is shown. The wording is ours."""

import enum
import json
from collections.abc import Sequence

from termrsi.records import CommandResult


class Wording(enum.StrEnum):
    """How one result is told."""

    exit_first = "exit_first"  # "[exit 0]", then the output
    exit_last = "exit_last"  # the output, an empty line, "(exit_code=0)"
    tags = "tags"  # <returncode>, <output>; of a long one <output_head>, <elided_chars>, <output_tail>
    json = "json"  # {"returncode", "output"}; of a long one output_head, output_tail, elided_chars, warning
    footer = "footer"  # the output, then a line with the exit code
    screen = "screen"  # what a terminal printed since the last look


LONG = "The output is long: look at parts of it with head, tail, grep or sed."


def shorten(text: str, limit: int) -> tuple[str, int, str]:
    """(head, characters left out, tail): the whole text as head if it has at most `limit` characters."""
    if len(text) <= limit:
        return text, 0, ""
    half = max(1, limit // 2)
    return text[:half], len(text) - 2 * half, text[-half:]


def cut(text: str, limit: int) -> str:
    """The text, or its two ends and a note between them."""
    head, omitted, tail = shorten(text, limit)
    return f"{head}\n[... {omitted} characters left out ...]\n{tail}" if omitted else head


def tell(wording: Wording, result: CommandResult, limit: int) -> str:
    """One result. `limit`: characters of output, as the episode allows; lines at its end that are empty are not shown."""
    text = result.output.rstrip("\n")
    head, omitted, tail = shorten(text, limit)
    match wording:
        case Wording.exit_first:
            first = "[timed out]" if result.timed_out else f"[exit {result.exit_code}]"
            return f"{first}\n{cut(text, limit)}" if text else first
        case Wording.exit_last:
            note = f"{LONG}\n" if omitted else ""
            last = "(timed out)" if result.timed_out else f"(exit_code={result.exit_code})"
            return f"{note}{cut(text, limit) or '(no output)'}\n\n{last}"
        case Wording.tags:
            code = f"<returncode>{_code(result)}</returncode>"
            note = "<exception>The command took too long and was ended.</exception>\n" if result.timed_out else ""
            if not omitted:
                return f"{note}{code}\n<output>\n{text}\n</output>"
            return (
                f"{note}{code}\n<warning>{LONG}</warning>\n<output_head>\n{head}\n</output_head>\n"
                f"<elided_chars>{omitted}</elided_chars>\n<output_tail>\n{tail}\n</output_tail>"
            )
        case Wording.json:
            told: dict[str, object] = {"returncode": _code(result)}
            ends = {"output_head": head, "output_tail": tail, "elided_chars": omitted, "warning": LONG}
            told |= ends if omitted else {"output": text}
            told |= {"exception_info": "The command took too long and was ended."} if result.timed_out else {}
            return json.dumps(told, ensure_ascii=False)
        case Wording.footer:
            code = "[the command took too long and was ended]" if result.timed_out else f"[exit code: {result.exit_code}]"
            return f"{cut(text, limit)}\n{code}".lstrip("\n")
        case Wording.screen:
            return f"New terminal output:\n{cut(text, limit)}" if text else "New terminal output: none"


def together(parts: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """Several results as one message; what of the reply was ignored comes first."""
    notes = [f"Note: {warning}." for warning in warnings]
    return "\n".join([*notes, *parts])


def _code(result: CommandResult) -> int:
    """A command that was ended has none of its own."""
    return -1 if result.timed_out else result.exit_code
