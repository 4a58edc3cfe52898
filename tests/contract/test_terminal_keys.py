"""A terminal by keystrokes inside a real sandbox of every backend: programs that wait for input, keys, what was printed since."""

from termrsi.harness.actions import Command
from termrsi.harness.terminal import Terminal
from termrsi.ports import Sandbox
from tests.contract.backends import Kit

PROMPT = "root@sandbox:{}$ "


def typing(*texts: str, wait_s: float = 5.0) -> list[Command]:
    return [Command(text, wait_s) for text in texts]


async def test_what_is_typed_and_what_is_printed(box: Sandbox) -> None:
    terminal = Terminal(box)
    assert (await terminal.send([])).output == PROMPT.format("/app")
    seen = await terminal.send(typing("cd /tmp\n", "x=5\n"))
    assert seen.output == f"cd /tmp\n{PROMPT.format('/tmp')}x=5\n{PROMPT.format('/tmp')}"
    assert (await terminal.send(typing("echo $x; pwd\n"))).output == f"echo $x; pwd\n5\n/tmp\n{PROMPT.format('/tmp')}"
    assert (await terminal.send(typing("cat > f <<E\na\nE\ncat f\n"))).output.endswith(f"cat f\na\n{PROMPT.format('/tmp')}")
    assert (await box.run("pwd; echo $x; cat /tmp/f")).output == "/app\n\na\n"  # a shell of its own, the same files


async def test_a_program_that_waits_for_input_and_keys_that_end_it(box: Sandbox, kit: Kit) -> None:
    terminal = Terminal(box)
    await terminal.send([])
    asked = await terminal.send(typing("read -p 'name? ' name\n", wait_s=1.0))
    assert asked.output.endswith("name? ")
    assert (await terminal.send(typing("me\n"))).output.startswith("me\n")
    assert "me\n" in (await terminal.send(typing("echo $name\n"))).output
    slow = await terminal.send(typing("sleep 300\n", wait_s=0.5))
    assert slow.output == "sleep 300\n"
    assert slow.duration_s < 5.0
    interrupted = (await terminal.send(typing("C-c", wait_s=2.0))).output.endswith(PROMPT.format("/app"))
    assert interrupted == ("keys that signal" not in kit.cannot)
    if not interrupted:
        await box.run("pkill -x sleep")
        await terminal.send([Command("", 1.0)])
    assert (await terminal.send(typing("echo half", wait_s=0.2))).output == "echo half"
    assert "\nhalf\n" in (await terminal.send(typing("Enter"))).output


async def test_it_is_begun_again_after_its_end(box: Sandbox) -> None:
    terminal = Terminal(box)
    await terminal.send(typing("x=5\n"))
    assert "Script" not in (await terminal.send(typing("exit\n", wait_s=1.0))).output
    assert (await terminal.send(typing("echo [$x]\n"))).output == f"{PROMPT.format('/app')}echo [$x]\n[]\n{PROMPT.format('/app')}"
    await box.kill_processes()
    assert (await terminal.send(typing("echo on\n"))).output.endswith(f"on\n{PROMPT.format('/app')}")


async def test_a_terminal_that_cannot_be_is_told_to_the_agent(box: Sandbox) -> None:
    await box.run("rm -f /usr/bin/script")
    result = await Terminal(box).send(typing("ls\n"))
    assert result.exit_code != 0
    assert result.output.startswith("the terminal could not be begun: ")


async def test_a_prompt_shown_late_is_waited_for(box: Sandbox) -> None:
    terminal = Terminal(box)
    await terminal.send(typing('PS1="> "; PROMPT_COMMAND+="; sleep 0.5"\n'))
    for word in ("one", "two"):
        assert (await terminal.send(typing(f"echo {word}\n"))).output == f"echo {word}\n{word}\n> "
