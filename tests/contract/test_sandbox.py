"""What every sandbox backend must do, run on each of them with real processes."""

import asyncio
import contextlib
import stat
from pathlib import Path

import pytest

from termrsi import sandbox
from termrsi.errors import SandboxError
from termrsi.ports import Sandbox
from tests.contract.backends import OWNER, Kit, Make


async def out(box: Sandbox, command: str, timeout_s: float | None = 20.0) -> str:
    return (await box.run(command, timeout_s)).output


# --- the shell ----------------------------------------------------------------------------------------------------


async def test_state_persists(box: Sandbox) -> None:
    await box.run("x=5; export Y=7; f() { echo f$x; }; alias hi='echo hello'; set -o noclobber; umask 027; declare -A m=([k]=v)")
    await box.run("mkdir -p /app/d; cd /app/d")
    text = await out(box, "f; hi; echo $Y ${m[k]}; pwd; umask; set -o | grep noclobber; env | grep -c '^x='")
    assert text.split() == ["f5", "hello", "7", "v", "/app/d", "0027", "noclobber", "on", "0"]


async def test_exit_codes_and_the_last_status(box: Sandbox) -> None:
    assert (await box.run("true")).exit_code == 0
    assert (await box.run("(exit 7)")).exit_code == 7
    assert await out(box, "echo $?") == "7\n"
    assert (await box.run("no_such_program_here")).exit_code == 127
    assert (await box.run("kill -9 $BASHPID & wait $!")).exit_code == 137


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("set -e; false; echo no", 1), (": ${none:?missing}", 1), ("f() { exit 4; }; f", 4)],
)
async def test_a_command_may_end_the_shell(box: Sandbox, command: str, code: int) -> None:
    await box.run("x=5; g() { echo g$x; }; cd /tmp")
    result = await box.run(command)
    assert result.exit_code in (code, 127 if ":?" in command else code)
    assert "no\n" not in result.output
    assert await out(box, "set +e; g; pwd") == "g5\n/tmp\n"


async def test_exec_replaces_the_shell_and_a_new_one_follows(box: Sandbox) -> None:
    await box.run("cd /tmp")
    result = await box.run("exec sh -c 'echo replaced; exit 9'")
    assert (result.exit_code, result.output) == (9, "replaced\n")
    assert await out(box, "pwd") == "/tmp\n"


async def test_many_lines(box: Sandbox) -> None:
    assert await out(box, "cat <<'EOF'\none $x\ntwo\nEOF\nfor i in 1 2; do\n  echo $i\ndone") == "one $x\ntwo\n1\n2\n"
    assert await out(box, "if true; then\necho yes\nfi # comment") == "yes\n"
    assert await out(box, f"cat <<E | wc -c\n{'x' * 300_000}\nE") == "300001\n"
    assert await out(box, "") == ""


async def test_what_cannot_be_parsed(box: Sandbox) -> None:
    for command in ("echo 'open", 'echo "open', "for i in", "if true; then", "echo )", "cat <<EOF\nno end"):
        await box.run(command, 5.0)
        assert await out(box, "echo fine") == "fine\n"


async def test_control_words_cannot_end_our_loop(box: Sandbox) -> None:
    await box.run("break; continue; return 3; done; fi")
    await box.run("return 3")
    assert await out(box, "echo fine") == "fine\n"


async def test_a_printed_marker_forges_nothing(box: Sandbox) -> None:
    forge = "for fd in 200 202 10 11 255; do (printf '0 1 /forged\\0' >&$fd) 2>/dev/null; done"
    result = await box.run(f"{forge}; (exit 5)")
    assert result.exit_code == 5
    assert await out(box, "pwd") == "/app\n"
    assert (await box.run("env printf '0 1 /forged\\0' >&202; exec 202>&-; (exit 6)")).exit_code == 6


async def test_commands_read_an_empty_input(box: Sandbox) -> None:
    result = await box.run("cat; read x; echo $?", 5.0)
    assert (result.output, result.timed_out) == ("1\n", False)


async def test_output_keeps_the_order_of_both_streams(box: Sandbox) -> None:
    assert await out(box, "echo 1; echo 2 >&2; echo 3; echo 4 >&2") == "1\n2\n3\n4\n"


async def test_bytes_that_are_not_text(box: Sandbox) -> None:
    assert await out(box, r"printf '\xff\xfeab\0c'") == "��ab\0c"
    assert "a" in await out(box, "head -c 100000 /dev/urandom; echo a")
    await box.run("x=$'\\xff'")
    assert await out(box, 'printf %s "$x" | wc -c') == "1\n"


async def test_large_output_keeps_head_and_tail(make: Make) -> None:
    box = await make(output_limit_bytes=10_000)
    result = await box.run("echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo last", 20.0)
    assert result.output.startswith("first\n")
    assert result.output.endswith("xlast\n")
    assert result.omitted_bytes == 20_000_000 + 11 - 10_000
    assert f"{result.omitted_bytes} bytes omitted" in result.output
    assert len(result.output) < 10_100


async def test_hostile_settings_of_the_shell(box: Sandbox) -> None:
    await box.run("printf() { builtin echo forged; }; alias .='echo'; set -x; IFS=0; set -u; set -f")
    assert "fine" in await out(box, "echo fine", 5.0)
    assert (await box.run("set -n", 0.5)).exit_code in (0, 124)
    assert "fine" in await out(box, "echo fine", 5.0)
    await box.run("exec 1>&- 2>&-; exec 201<&-; exec 203<&-", 0.5)
    assert "fine" in await out(box, "echo fine", 5.0) + await out(box, "echo fine", 5.0)


async def test_a_background_job_lives_between_commands(box: Sandbox) -> None:
    await box.run("(while :; do date +%N > /tmp/b; mv /tmp/b /tmp/beat; sleep 0.02; done) &")
    first = await out(box, "sleep 0.1; cat /tmp/beat")
    assert await out(box, "sleep 0.1; cat /tmp/beat") != first
    assert await box.kill_processes() >= 1
    third = await out(box, "cat /tmp/beat")
    assert await out(box, "sleep 0.1; cat /tmp/beat") == third


async def test_output_of_a_job_that_never_stops(box: Sandbox) -> None:
    await box.run("yes noise &")
    assert (await box.run("true", 5.0)).timed_out is False


# --- time-outs ----------------------------------------------------------------------------------------------------

LONG = {
    "program": "sleep 61",
    "loop": "while :; do :; done",
    "loop of programs": "while :; do sleep 0.01; done; touch /tmp/evil",
    "list": "sleep 61; touch /tmp/evil",
    "functions": "g() { sleep 61; }; h() { while :; do g; done; }; h",
    "setsid": "setsid sleep 61 & nohup sleep 62 & wait",
    "double fork": "(setsid sh -c 'trap \"\" TERM HUP; sleep 61 & exec sleep 62' &); sleep 63",
    "pipeline": "sleep 61 | cat",
    "substitution": "y=$(sleep 61)",
    "stopped": "kill -STOP $$",
    "deaf": "trap '' TERM INT HUP 57 58; while :; do :; done",
}


@pytest.mark.parametrize("kind", LONG)
async def test_a_time_out_ends_the_whole_tree(box: Sandbox, kind: str) -> None:
    await box.run("x=5; cd /tmp; sleep 77 &")
    await asyncio.sleep(0.03)
    result = await box.run(f"echo part; {LONG[kind]}", 0.3)
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "part\n")
    assert result.duration_s < 30.0
    await box.run("list() { for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null; }")
    assert await out(box, "list | grep -E '^sleep 6' ; pwd; [ -e /tmp/evil ] && echo evil") == "/tmp\n"
    if kind not in ("stopped", "deaf"):  # there the shell itself had to die
        assert await out(box, "echo $x; pgrep -c -f 'slee[p] 77'") == "5\n1\n"


async def test_nothing_is_said_later_of_what_a_time_out_ended(box: Sandbox) -> None:
    """A bash whose `wait` is interrupted as a child dies may not notice that death before the next child's."""
    for _ in range(8):
        assert (await box.run("sleep 61 & sleep 62 & wait", 0.1)).timed_out
        assert await out(box, "true | true; echo fine") == "fine\n"


async def test_a_fork_bomb_is_contained(make: Make, kit: Kit) -> None:
    box = await make(pids=64)
    bomb = box.run("b() { b | b & }; b; sleep 30", 1.0)
    try:
        assert (await bomb).duration_s < 15.0
        await box.kill_processes()
        assert await out(box, "echo fine") == "fine\n"
    except SandboxError:
        assert "life at its limits" in kit.cannot


# --- files --------------------------------------------------------------------------------------------------------


async def test_put_and_get(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(bytes(range(256)))
    (source / "link").symlink_to("sub/data")
    await box.put(source, "/tests")
    assert await out(box, "/tests/run.sh; stat -c '%u %a' /tests/run.sh; readlink /tests/link; wc -c < /tests/sub/data") == (
        "ran\n0 755\nsub/data\n256\n"
    )
    await box.run("touch /tests/kept")
    await box.put(source / "run.sh", "/tests/sub/")
    await box.put(source / "run.sh", "/deep/er/name")
    await box.put(source, "/tests")
    assert await out(box, "ls /tests/kept /tests/sub/run.sh /deep/er/name | wc -l") == "3\n"
    await box.get("/tests", tmp_path / "back")
    assert (tmp_path / "back/sub/data").read_bytes() == bytes(range(256))
    assert (tmp_path / "back/link").readlink() == Path("sub/data")
    await box.get("/deep/er/name", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "#!/bin/sh\necho ran\n"


async def test_links_inside_never_reach_the_host(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    await box.run(f"mkdir -p {tmp_path}; ln -s {tmp_path} /out; ln -s {secret} /file; ln -s ../../../../../..{secret} /up")
    payload = tmp_path / "payload"
    payload.write_text("agent")
    await box.put(payload, "/out/secret")
    await box.put(payload, "/file")
    assert secret.read_text() == "host"
    assert await out(box, f"cat {secret}; cat /file") == "agentagent"
    await box.run(f"rm -f {secret}; ln -s /proc/1/root{secret} /magic")
    for path in ("/up", "/file2", "/magic", "/out/secret"):
        with pytest.raises(SandboxError):
            await box.get(path, tmp_path / "stolen")
    await box.run(f"mkdir /bait; ln -s {tmp_path} /bait/d; ln -s /etc/passwd /bait/p; mkfifo /bait/pipe")
    await box.get("/bait", tmp_path / "bait")
    assert (tmp_path / "bait/d").is_symlink()
    assert not (tmp_path / "bait/pipe").exists()
    await box.run("rm /bait/d; mkdir /bait/d; echo bad > /bait/d/secret")
    await box.get("/bait", tmp_path / "bait")
    assert secret.read_text() == "host"


async def test_missing_files_are_errors(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="none"):
        await box.get("/none", tmp_path / "x")
    with pytest.raises(SandboxError, match="none"):
        await box.put(tmp_path / "none", "/x")
    assert await out(box, "echo fine") == "fine\n"


# --- isolation ----------------------------------------------------------------------------------------------------


async def test_the_environment_is_clean(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    box = await make(env={"GIVEN": "a b"}, workdir="/srv/w")
    names = {line.partition("=")[0] for line in (await out(box, "env")).splitlines()}
    assert "HOST_SECRET" not in names
    assert {"PATH", "HOME", "LANG", "TERM", "PAGER", "GIT_PAGER", "GIVEN"} <= names
    assert await out(box, "echo $GIVEN; pwd; id -u; hostname") == "a b\n/srv/w\n0\nsandbox\n"


async def test_no_network(box: Sandbox) -> None:
    assert await out(box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | xargs") == "lo\n"
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); print('lo')"
    assert await out(box, f'/usr/bin/python3 -c "{code}"') == "lo\n"
    assert (await box.run("timeout 2 bash -c 'echo > /dev/tcp/1.1.1.1/53'")).exit_code == 1


@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs x /mnt",
        "mknod /tmp/disk b 8 0 && head -c 1 /tmp/disk",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "umount /proc",
        "chroot / true",
        "nsenter -t 1 -m true",
        "cat /proc/1/environ",
        "cat /proc/1/fd/*",
        "readlink /proc/1/fd/0",
        "hostname other",
        "cat /proc/kcore | head -c 1 | grep -q .",
        "touch /sys/x/y",
    ],
)
async def test_powers_over_the_host_are_gone(box: Sandbox, kit: Kit, command: str) -> None:
    if "/proc/1/" in command and "hidden process 1" in kit.cannot:
        command = command.replace("/proc/1/", "/proc/2/")  # of no process
    assert (await box.run(command, 5.0)).exit_code != 0


async def test_the_host_is_never_written(box: Sandbox) -> None:
    await box.run("echo x > /usr/bin/termrsi_probe; rm -rf /etc/apt; echo x >> /etc/passwd; rm -f /usr/bin/env")
    assert not Path("/usr/bin/termrsi_probe").exists()
    assert Path("/usr/bin/env").exists()
    assert not Path("/etc/passwd").read_text().endswith("x\n")
    assert await out(box, "tail -n 1 /etc/passwd; ls /usr/bin/env 2>&1 | grep -c 'No such'") == "x\n1\n"


async def test_disk_and_memory_are_limited(make: Make, kit: Kit) -> None:
    box = await make(disk_mb=16, memory_mb=128)
    result = await box.run("head -c 40000000 /dev/zero > /tmp/big", 20.0)
    if "disk limit" not in kit.cannot:
        assert result.exit_code != 0
        assert "No space left" in result.output
    await box.run("rm -f /tmp/big")
    hog = box.run("/usr/bin/python3 -c 'b = bytearray(600 << 20); print(len(b))'", 20.0)
    if "life at its limits" in kit.cannot:
        with pytest.raises(SandboxError):
            await hog
        return
    assert (await hog).exit_code != 0
    assert await out(box, "echo fine") == "fine\n"


async def test_closed_while_it_starts(kit: Kit) -> None:
    for delay_s in (0.0, 0.004, 0.05, 0.2):
        box = sandbox.make(kit.name, **(kit.options | {"owner": OWNER}))
        start = asyncio.ensure_future(box.start())
        await asyncio.sleep(delay_s)  # wherever that is in its start
        await box.close()
        with contextlib.suppress(SandboxError):  # or it had started
            await start
        with pytest.raises(SandboxError):
            await box.run("true")
    assert kit.left() == []


# --- snapshots and forks ------------------------------------------------------------------------------------------

FILES = r"""
mkdir -p /app/keep/deep /app/gone; echo base > /app/keep/file; echo x > /app/gone/f
chmod 640 /app/keep/file; chown 12:34 /app/keep/file 2>/dev/null; chmod 4755 /app/keep/deep
ln -s /nowhere /app/dangling; ln /app/keep/file /app/hard; touch -d '2001-02-03 04:05:06' /app/keep/file
truncate -s 50M /app/sparse; mkfifo /app/pipe; rm -f /usr/bin/env /etc/debian_version; rm -rf /app/gone
rm -rf /etc/apt; mkdir /etc/apt; echo new > /etc/apt/only; echo 'é ü' > $'/app/odd \n name'
"""
LOOK = r"""
stat -c '%n %F %a %u %g %h' /app/keep/file /app/keep/deep /app/hard /app/pipe; stat -c %Y /app/keep/file
readlink /app/dangling; ls /app/gone /usr/bin/env /etc/debian_version 2>&1; ls -A /etc/apt; ls -A /app | wc -l
[ /app/hard -ef /app/keep/file ] && echo same; stat -c '%s' /app/sparse
"""


async def test_a_snapshot_keeps_files_and_shell(make: Make, kit: Kit) -> None:
    box = await make()
    await box.run(FILES)
    await box.run("x='a b'; export Y=$'q\\'\\n'; arr=(1 '2 3'); f() { echo f$x; }; alias hi='echo hello'; umask 077; cd /app/keep")
    await box.run("set -o noclobber; shopt -s extglob nullglob; readonly ro=1; sleep 99 & setsid sleep 98 & sleep 0.1")
    before = await out(box, LOOK)
    snapshot = await box.snapshot()
    if "running processes" in kit.cannot:
        assert any("sleep 99" in line for line in snapshot.lost_processes)
        assert len(snapshot.lost_processes) == 2
    else:
        assert snapshot.lost_processes == ()
    ask = """f; hi; printf '%s|' "$Y" "${arr[@]}" $ro; pwd; umask; shopt -p extglob nullglob
        set -o | grep noclobber; export -p | grep -c ' Y='"""
    expected = "fa b\nhello\nq'\n|1|2 3|1|/app/keep\n0077\nshopt -s extglob\nshopt -s nullglob\nnoclobber      \ton\n1\n"
    copy = await make(snapshot=snapshot)
    for one in (box, copy):
        assert await out(one, ask) == expected
        assert await out(one, LOOK) == before
        if "holes" not in kit.cannot:
            assert int(await out(one, "stat -c %b /app/sparse")) < 100
        assert await out(one, "pgrep -c 'slee[p]'") == ("0\n" if "running processes" in kit.cannot else "2\n")


SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 8123))
count = 0
while True:
    connection, _ = server.accept()
    count += 1
    connection.sendall(b"%d" % count)
    connection.close()
"""
ASK = "import socket; print(socket.create_connection(('127.0.0.1', 8123)).recv(9).decode())"


async def test_what_runs_in_a_failed_sandbox_is_alive_in_its_forks(make: Make, kit: Kit, tmp_path: Path) -> None:
    """Or is named, with what it listened at."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "ask.py").write_text(ASK)
    box = await make()
    for name in ("server.py", "ask.py"):
        await box.put(tmp_path / name, f"/srv/{name}")
    await box.run("i=0; (while :; do i=$((i + 1)); echo $i > /tmp/c; mv /tmp/c /tmp/count; sleep 0.02; done) &")
    await box.run("/usr/bin/python3 /srv/server.py &")
    await box.run("exec 9>/tmp/open; echo first >&9; rm /tmp/open")
    asked = int(await out(box, "until /usr/bin/python3 /srv/ask.py 2>/dev/null; do sleep 0.05; done"))
    counted = int(await out(box, "until [ -e /tmp/count ]; do sleep 0.02; done; cat /tmp/count"))
    if "running processes" in kit.cannot:
        snapshot = await box.snapshot()
        assert any("server.py" in line and "8123" in line for line in snapshot.lost_processes), snapshot.lost_processes
        assert int(await out(box, "sleep 0.1; a=$(cat /tmp/count); sleep 0.1; echo $(($(cat /tmp/count) - a))")) == 0
        kit.discard(snapshot)
        return
    copies = await box.fork(4)
    try:
        for one in (box, *copies):
            assert int(await out(one, "/usr/bin/python3 /srv/ask.py")) == asked + 1  # each goes on from the same moment
            first = int(await out(one, "cat /tmp/count"))
            assert first >= counted
            assert int(await out(one, "sleep 0.3; cat /tmp/count")) > first
            assert await out(one, "echo second >&9; cat /proc/$$/fd/9") == "first\nsecond\n"
            assert await out(one, "kill %2; wait %2; jobs -r | grep -c Running") == "1\n"
    finally:
        await asyncio.gather(*(one.close() for one in copies))
        await box.close()
    assert kit.left() == []


async def test_copies_are_isolated(make: Make) -> None:
    box = await make()
    await box.run("echo base > /app/f; x=1")
    snapshot = await box.snapshot()
    first, second = await make(snapshot=snapshot), await make(snapshot=snapshot)
    await box.run("echo box > /app/f; x=2")
    await first.run("echo first > /app/f; rm -rf /tmp; x=3")
    assert await out(second, "cat /app/f; echo $x; ls -d /tmp") == "base\n1\n/tmp\n"
    assert await out(box, "cat /app/f; echo $x") == "box\n2\n"
    assert await out(await make(snapshot=snapshot), "cat /app/f; echo $x") == "base\n1\n"


async def test_a_snapshot_of_a_restored_sandbox_outlives_the_first(make: Make, kit: Kit) -> None:
    box = await make()
    await box.run("echo 1 > /app/one; echo 1 > /app/both")
    first = await box.snapshot()
    middle = await make(snapshot=first)
    await middle.run("echo 2 > /app/two; rm /app/both")
    second = await middle.snapshot()
    for one in (box, middle):
        await one.close()
    kit.discard(first)
    last = await make(snapshot=second)
    assert await out(last, "cd /app; ls; cat one two") == "one\ntwo\n1\n2\n"
    await last.close()
    kit.discard(second)
    kit.discard(second)
    assert kit.left() == []


async def test_forks(make: Make, kit: Kit) -> None:
    box = await make()
    await box.run("x=5; cd /tmp; echo base > f")
    copies = await box.fork(3)
    try:
        assert [await out(one, "echo $x; pwd; cat f") for one in copies] == ["5\n/tmp\nbase\n"] * 3
        await copies[0].run("echo changed > f; x=6")
        assert await out(copies[1], "cat f; echo $x") == "base\n5\n"
        assert await out(box, "cat f; echo $x") == "base\n5\n"
    finally:
        for one in copies:
            await one.close()
        await box.close()
    assert kit.left() == []


# --- ends ---------------------------------------------------------------------------------------------------------


async def test_descriptors_are_given_back(make: Make) -> None:
    await (await make()).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(4):
        box = await make()
        await box.run("exit 1")
        await box.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 4  # another part of this process may have opened one meanwhile


async def test_a_cancelled_command_loses_the_sandbox(make: Make) -> None:
    box = await make()
    running = asyncio.create_task(box.run("sleep 4714"))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxError):
        await box.run("true")
    await box.close()


async def test_a_file_that_claims_to_be_huge(box: Sandbox, kit: Kit, tmp_path: Path) -> None:
    await box.run("truncate -s 1T /app/huge; echo end >> /app/huge")
    if "holes" in kit.cannot:
        with pytest.raises(SandboxError, match="huge"):
            await asyncio.wait_for(box.get("/app/huge", tmp_path / "huge"), 10.0)
        return
    await asyncio.wait_for(box.get("/app/huge", tmp_path / "huge"), 10.0)
    assert (tmp_path / "huge").stat().st_blocks < 1000


async def test_modes_of_the_fresh_directories(box: Sandbox) -> None:
    assert await out(box, "stat -c '%a' /tmp /root /logs/verifier /var/tmp /dev/shm") == "1777\n700\n777\n1777\n1777\n"
    assert stat.S_ISDIR(Path("/tmp").stat().st_mode)


# --- what a machine or an agent does between two commands ------------------------------------------------------------


async def test_a_shell_that_died_between_two_commands_is_replaced(box: Sandbox) -> None:
    """By the memory limit, or a job that the agent left: the next command runs, and is not charged with a time-out."""
    await box.run("cd /tmp; (sleep 0.1; kill -9 $$) &")
    await asyncio.sleep(0.5)
    result = await box.run("echo $PWD", 5.0)
    assert (result.output, result.exit_code, result.timed_out) == ("/tmp\n", 0, False)


async def test_a_snapshot_of_a_shell_that_has_died(box: Sandbox) -> None:
    await box.run("echo kept > /tmp/f; (sleep 0.1; kill -9 $$) &")
    await asyncio.sleep(0.5)
    await box.snapshot()
    assert await out(box, "cat /tmp/f") == "kept\n"


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "KILL", "CHLD"])
async def test_the_agent_cannot_end_process_1(box: Sandbox, kit: Kit, name: str) -> None:
    if name == "KILL" and "unkillable process 1" in kit.cannot:
        with pytest.raises(SandboxError):
            await box.run("kill -KILL 1; sleep 5", 10.0)
        return
    await box.run(f"kill -{name} 1", 5.0)
    assert await out(box, "echo alive") == "alive\n"
