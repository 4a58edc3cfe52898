"""A recipe becomes a Harbor task directory: instruction, task.toml, environment, tests with a small bash harness, solution."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from termrsi.tasks.bundled.recipe import Recipe

AGENT_TIMEOUT_S = (60.0, 120.0, 240.0)  # by level
VERIFIER_TIMEOUT_S = 60.0

# Tools that the base image lacks are installed where they are missing: in a sandbox on the host's root they are there.
_TOOLS = {
    "git": (
        "command -v git > /dev/null || (apt-get update && apt-get install -y --no-install-recommends git)",
        "git config --system user.name agent && git config --system user.email agent@example.com"
        " && git config --system init.defaultBranch main && git config --system safe.directory '*'",
    ),
    "python_repair": ("command -v python3 > /dev/null || (apt-get update && apt-get install -y --no-install-recommends python3)",),
}

_HARNESS = r"""#!/bin/bash
# Generated checks. Each runs in a subshell of its own, so that a failing one does not stop the rest.
mkdir -p /app /logs/verifier
cd /app || exit 1
export LC_ALL=C

# The whole file equals the text, newlines at its end aside.
text() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
# The file without any white space equals the text.
flat() { [ -f "$1" ] && [ "$(tr -d '[:space:]' < "$1")" = "$2" ]; }
# What the agent wrote may hang.
run() { timeout -k 1 10 "$@"; }

@FUNCTIONS@
names="@NAMES@"
passed=0 failed=0 rows=""
for name in $names; do
  if ( "check_$name" ) > /dev/null 2>&1 < /dev/null; then
    status=passed passed=$((passed + 1))
    echo "PASSED $name"
  else
    status=failed failed=$((failed + 1))
    echo "FAILED $name"
  fi
  rows="$rows${rows:+,}{\"name\":\"$name\",\"status\":\"$status\",\"duration\":0}"
done
total=$((passed + failed))
echo "$passed passed, $failed failed"
now=$(date +%s)000
printf '{"results":{"tool":{"name":"checks"},"summary":{"tests":%d,"passed":%d,"failed":%d,"skipped":0,"pending":0,"other":0,' \
  "$total" "$passed" "$failed" > /logs/verifier/ctrf.json
printf '"start":%s,"stop":%s},"tests":[%s]}}\n' "$now" "$now" "$rows" >> /logs/verifier/ctrf.json
if [ "$failed" -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True)
class Label:
    """Which task: `seed` counts from 0 inside its split."""

    family: str
    level: int
    split: str
    seed: int


def write(root: Path, label: Label, recipe: Recipe, *, template: int, recorded_seed: int) -> Path:
    """Write the task under `root` and return its directory. Modes are set, so that the caller's umask plays no part."""
    name = f"{label.family}-{label.level}-{label.split}-{label.seed:04d}"
    target = root / name
    (target / "environment" / "files").mkdir(parents=True, exist_ok=True)
    put(target / "instruction.md", recipe.wordings[template] + "\n")
    put(target / "task.toml", _config(label, template, recorded_seed))
    put(target / "environment" / "Dockerfile", dockerfile(label.family, recipe))
    for path, content in recipe.files.items():
        # Scripts can be run by name; a recipe that wants them otherwise says so in its setup.
        put(target / "environment" / "files" / path, content, mode=0o755 if content.startswith("#!") else 0o644)
    put(target / "tests" / "test.sh", test_script(recipe.checks), mode=0o755)
    put(target / "solution" / "solve.sh", f"#!/bin/bash\nset -e\ncd /app\n{recipe.solution}\n", mode=0o755)
    return target


def put(path: Path, content: str, mode: int = 0o644) -> None:
    """A file with its mode, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", newline="\n")
    path.chmod(mode)


def _config(label: Label, template: int, recorded_seed: int) -> str:
    return f"""schema_version = "1.1"

[metadata]
family = "{label.family}"
level = {label.level}
split = "{label.split}"
seed = {recorded_seed}
template = {template}

[agent]
timeout_sec = {AGENT_TIMEOUT_S[label.level - 1]}

[verifier]
timeout_sec = {VERIFIER_TIMEOUT_S}

[environment]
allow_internet = false
build_timeout_sec = 120.0
cpus = 1
memory_mb = 512
"""


def dockerfile(family: str, recipe: Recipe) -> str:
    lines = ["FROM debian:bookworm-slim", "WORKDIR /app", "COPY files/ /app/"]
    lines += [f"RUN {line}" for line in (*_TOOLS.get(family, ()), *recipe.setup)]
    return "\n".join(lines) + "\n"


def test_script(checks: Mapping[str, str]) -> str:
    """tests/test.sh: each check (name -> bash) in a subshell; a report, and the reward 1 if all of them pass."""
    functions = "".join(f"check_{name}() {{\n{body}\n}}\n" for name, body in checks.items())
    return _HARNESS.replace("@FUNCTIONS@", functions).replace("@NAMES@", " ".join(checks))
