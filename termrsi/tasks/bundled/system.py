"""Families on the system: archive, git, processes, arguments, environment."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, gone, same


def archive_1(d: Draw) -> Recipe:
    a, folder, f, content = d.file("tar"), d.word(), d.file(), d.text(3)
    return Recipe(
        wordings=(
            f"Extract the archive {a}.",
            f"Unpack the archive {a} here.",
            f"Extract the tar file {a} in this directory.",
            f"Unpack {a} into the present directory.",
            f"Take the files out of the tar archive {a}.",
        ),
        files={f"{folder}/{f}": content},
        setup=(f"tar -cf {a} {folder} && rm -r {folder}",),
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "file_extracted": same(f"{folder}/{f}", content),
            "archive_kept": exists(a),
        },
        solution=f"tar -xf {a}",
    )


def archive_2(d: Draw) -> Recipe:
    a, folder, out, (p, q) = f"{d.word()}.tar.gz", d.word(), d.file(), d.words(2)
    x, y = d.text(2), d.text(2)
    return Recipe(
        wordings=(
            f"Pack the folder {folder} into the compressed archive {a} and write the list of the archive's contents to {out}.",
            f"Create {a} from the directory {folder}. Then list what {a} contains in {out}.",
            f"Make a gzip-compressed tar archive {a} of {folder} and save its table of contents in {out}.",
            f"The directory {folder} shall be archived as {a} (tar with gzip); {out} shall list the entries of that archive.",
            f"Archive {folder} as {a}, compressed with gzip, and record the archive's listing in {out}.",
        ),
        files={f"{folder}/{p}.txt": x, f"{folder}/{q}.txt": y},
        checks={
            "archive_exists": exists(a),
            "archive_is_gzip": f"gzip -t {a}",
            "archive_right": f"""[ "$(tar -xzOf {a} {folder}/{p}.txt)" = "{x.strip()}" ]""",
            "contents_listed": f"grep -q {p}.txt {out} && grep -q {q}.txt {out}",
            "folder_kept": both(same(f"{folder}/{p}.txt", x), same(f"{folder}/{q}.txt", y)),
        },
        solution=f"tar -czf {a} {folder}\ntar -tf {a} > {out}",
    )


def archive_3(d: Draw) -> Recipe:
    outer, inner, folder, (p, q, r) = f"{d.word()}.tar.gz", f"{d.word()}.tar", d.word(), d.words(3)
    x, y = d.text(2), d.text(2)
    return Recipe(
        wordings=(
            f"{outer} contains another archive, {inner}. Unpack both, delete all .log files in the unpacked folder "
            f"{folder}, and "
            "pack that folder as clean.tar.gz.",
            f"Extract {outer}, then the archive {inner} in it. Remove the .log files of the folder {folder} and create "
            "clean.tar.gz from that folder.",
            f"Unpack {outer} and the {inner} inside. Delete {folder}'s .log files, then archive {folder} again as clean.tar.gz.",
            f"Inside {outer} is {inner}, which holds the folder {folder}. Get it out, strip its .log files and make "
            "clean.tar.gz "
            "of it.",
            f"Produce clean.tar.gz: the folder {folder} from {inner} (itself inside {outer}), unpacked here, without its .log "
            "files.",
        ),
        files={f"{folder}/{p}.txt": x, f"{folder}/{q}.txt": y, f"{folder}/{r}.log": "noise\n"},
        setup=(f"tar -cf {inner} {folder} && rm -r {folder} && tar -czf {outer} {inner} && rm {inner}",),
        checks={
            "folder_unpacked": both(same(f"{folder}/{p}.txt", x), same(f"{folder}/{q}.txt", y)),
            "logs_deleted": f"[ -d {folder} ] && " + gone(f"{folder}/{r}.log"),
            "archive_is_gzip": "gzip -t clean.tar.gz",
            "archive_right": '[ "$(tar -tzf clean.tar.gz | grep -c txt)" = 2 ] && ! tar -tzf clean.tar.gz | grep -q log',
            "source_kept": exists(outer),
        },
        solution=f"tar -xzf {outer}\ntar -xf {inner}\nrm {folder}/*.log\ntar -czf clean.tar.gz {folder}",
    )


def git_1(d: Draw) -> Recipe:
    folder, other, kept = d.word(), d.file(), d.text(2)
    return Recipe(
        wordings=(
            f"Create a git repository in a new directory named {folder}.",
            f"Create a new git repository called {folder}.",
            f"Initialize a git repository in the directory {folder}.",
            f"Make the directory {folder} a fresh git repository.",
            f"Set up an empty git repository named {folder}.",
            f"Please create a git repository named {folder}.",
            f"Use git init to create the repository {folder}.",
            f"Start a new git repository in a folder called {folder}.",
            f"Create the directory {folder} as a git repository.",
            f"We need a new git repository, {folder}. Create it.",
            f"Make a git repository {folder}.",
            f"Initialize a new git repository named {folder}.",
            f"Create a repository {folder} with git init.",
            f"Run git init for a new directory named {folder}.",
            f"There should be an empty git repository in a folder {folder}.",
        ),
        files={other: kept},
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "is_repository": f'[ "$(git -C {folder} rev-parse --show-toplevel)" = /app/{folder} ]',
            "other_kept": same(other, kept),
        },
        solution=f"git init {folder}",
    )


def git_2(d: Draw) -> Recipe:
    a, b, w, x = d.file(), d.file(), d.word(), d.text(2)
    message = f"Add {w}"
    return Recipe(
        wordings=(
            f'This directory is a git repository. Add {a} and commit it with the message "{message}".',
            f'Commit the new file {a} to the git repository here with the message "{message}".',
            f'Use git to add {a} and make a commit with the message "{message}".',
            f'The file {a} is not yet in the git repository of this directory. Commit it; message: "{message}".',
            f'Record {a} in git (the repository is here) in a commit that says "{message}".',
        ),
        files={a: x, b: "first\n"},
        setup=(f"git init -q && git add {b} && git commit -q -m start",),
        checks={
            "file_tracked": f"git ls-files --error-unmatch {a}",
            "new_commit": '[ "$(git rev-list --count HEAD)" = 2 ]',
            "message_right": f'[ "$(git log -1 --format=%s)" = "{message}" ]',
            "content_committed": f'[ "$(git show HEAD:{a})" = "{x.strip()}" ]',
            "history_kept": "git log --format=%s | grep -qx start",
        },
        solution=f"git add {a}\ngit commit -m '{message}'",
    )


def git_3(d: Draw) -> Recipe:
    a, branch, w, tag = d.file(), d.word(), d.word(), f"v{d.number(1, 9)}.{d.number(0, 9)}"
    x = d.text(2)
    return Recipe(
        wordings=(
            f"In the git repository here, create the branch {branch}, append the line {w} to {a} there and commit it; then "
            "merge "
            f"{branch} into main and tag the result {tag}. End on main.",
            f"Make a git branch {branch}. On it add the line {w} to the end of {a} and commit. Switch back to main, merge "
            f"{branch} "
            f"and create the tag {tag}.",
            f"Using git: new branch {branch}, add the last line {w} to {a}, commit, return to main, merge {branch}, tag "
            "main as "
            f"{tag}.",
            f"The repository here needs a branch {branch} with one commit that appends the line {w} to {a}. Afterwards "
            "main should "
            f"contain it by merge, be checked out, and carry the tag {tag}.",
            f"Develop on a branch {branch} (append line {w} to {a}, commit), bring it into main, stay on main, and mark "
            "the state "
            f"with the tag {tag}.",
        ),
        files={a: x},
        setup=(f"git init -q -b main && git add {a} && git commit -q -m start",),
        checks={
            "branch_exists": f"git rev-parse --verify refs/heads/{branch}",
            "branch_has_line": f"git show {branch}:{a} | tail -n 1 | grep -qx {w}",
            "main_has_line": f"git show main:{a} | tail -n 1 | grep -qx {w}",
            "tag_on_main": f'[ "$(git rev-parse {tag}^{{commit}})" = "$(git rev-parse main)" ]',
            "on_main": '[ "$(git symbolic-ref --short HEAD)" = main ] && [ "$(git rev-list --count HEAD)" -ge 2 ]',
        },
        solution=f"git checkout -b {branch}\necho {w} >> {a}\ngit commit -am 'Add {w}'\ngit checkout main\ngit merge {branch}\n"
        f"git tag {tag}",
    )


def processes_1(d: Draw) -> Recipe:
    s, f, w = d.file("sh"), d.file(), d.word()
    body = f"#!/bin/bash\necho {w} > {f}\nsleep 300\n"
    return Recipe(
        wordings=(
            f"Run the script {s} in the background.",
            f"Start {s} in the background.",
            f"Start the script {s} as a background process.",
            f"Launch {s} in the background.",
            f"The script {s} should be running in the background. Start it.",
        ),
        files={s: body},
        checks={"script_started": exists(f), "mark_right": same(f, w), "script_kept": same(s, body)},
        solution=f"bash {s} > /dev/null 2>&1 &\nsleep 0.5",
    )


def processes_2(d: Draw) -> Recipe:
    s, pid = d.file("sh"), f"{d.word()}.pid"
    body = "#!/bin/bash\necho $$ > own.txt\nsleep 300\n"
    return Recipe(
        wordings=(
            f"Start {s} in the background and write its process id to {pid}.",
            f"Run the script {s} in the background and save its PID in {pid}.",
            f"Launch {s} as a background process, then write the process id of it to {pid}.",
            f"Start {s} such that it runs on in the background; {pid} should hold its process number.",
            f"Have {s} running in the background, with its PID recorded in {pid}.",
        ),
        files={s: body},
        checks={
            "script_started": exists("own.txt"),
            "pid_written": f"[ \"$(tr -d '0-9\\n' < {pid} | wc -c)\" = 0 ] && [ -s {pid} ]",
            "pid_right": f'[ -s own.txt ] && [ "$(cat own.txt)" = "$(cat {pid})" ]',
            "script_kept": same(s, body),
        },
        solution=f"bash {s} > /dev/null 2>&1 &\necho $! > {pid}\nsleep 0.5",
    )


def processes_3(d: Draw) -> Recipe:
    s, w, out = d.file("sh"), d.word(), d.file()
    body = (
        f"#!/bin/bash\ntrap 'echo {w} > stopped.txt; exit 0' TERM\necho $$ > worker.pid\n"
        "for i in 1 2 3; do sleep 0.2; echo step $i >> steps.txt; done\necho ready > ready.txt\nwhile true; do sleep 0.1; "
        "done\n"
    )
    return Recipe(
        wordings=(
            f"Start {s} in the background, wait until the file ready.txt appears, send the process in worker.pid the TERM "
            "signal, "
            f"and when stopped.txt appears copy it to {out}.",
            f"Run {s} in the background. Once it has made ready.txt, terminate it with SIGTERM (its PID is in worker.pid). "
            "It then "
            f"writes stopped.txt: copy that to {out}.",
            f"Launch {s} as a background process and wait for ready.txt. Then stop it by kill with the PID of worker.pid, "
            "and copy "
            f"the stopped.txt it leaves to {out}.",
            f"{s} writes worker.pid, later ready.txt, and on SIGTERM stopped.txt. Start it in the background, stop it by "
            "SIGTERM "
            f"when ready, and copy stopped.txt to {out}.",
            f"Bring {s} through its life: background start, wait for ready.txt, SIGTERM to the PID in worker.pid, and a "
            "copy of "
            f"stopped.txt as {out}.",
        ),
        files={s: body},
        checks={
            "script_started": exists("worker.pid"),
            "waited_for_ready": exists("ready.txt"),
            "stopped_by_signal": same("stopped.txt", w),
            "copy_right": same(out, w),
            "script_kept": same(s, body),
        },
        solution=f"bash {s} > /dev/null 2>&1 &\nuntil [ -f ready.txt ]; do sleep 0.1; done\nkill $(cat worker.pid)\n"
        f"until [ -s stopped.txt ]; do sleep 0.1; done\ncp stopped.txt {out}",
    )


def arguments_1(d: Draw) -> Recipe:
    s, out, v, w = d.file("sh"), d.file(), d.word(), d.word()
    body = f'#!/bin/bash\necho "{v} $1"\n'
    return Recipe(
        wordings=(
            f"Run {s} with the argument {w} and write the output to {out}.",
            f"Run the script {s} with the argument {w} and save its output in {out}.",
            f"Run {s} {w} and save the output to {out}.",
            f"Execute {s} with {w} as its argument; store the output in {out}.",
            f"{out} should hold what {s} prints for the argument {w}.",
        ),
        files={s: body},
        checks={
            "output_exists": exists(out),
            "argument_used": f"grep -qw {w} {out}",
            "output_right": same(out, f"{v} {w}"),
            "script_kept": same(s, body),
        },
        solution=f"bash {s} {w} > {out}",
    )


def arguments_2(d: Draw) -> Recipe:
    s, a, out, v, names = d.file("sh"), d.file(), d.file(), d.word(), d.words(3)
    body = f'#!/bin/bash\necho "{v} $1"\n'
    listed = "\n".join(names) + "\n"
    return Recipe(
        wordings=(
            f"Run {s} once for each line of {a}, with the line as its argument, and write all the output to {out}.",
            f"For every line of {a} run {s} with that line as the argument. Collect the output in {out}.",
            f"Run the script {s} for each name in {a} and save the outputs, in order, in {out}.",
            f"Call {s} with each line of {a} in turn, one per call; {out} should hold everything printed.",
            f"{out} should be what {s} prints for the lines of {a}, one call per line, in the same order.",
        ),
        files={s: body, a: listed},
        checks={
            "output_exists": exists(out),
            "first_line_right": f'[ "$(head -n 1 {out})" = "{v} {names[0]}" ]',
            "output_right": same(out, "\n".join(f"{v} {name}" for name in names)),
            "inputs_kept": both(same(s, body), same(a, listed)),
        },
        solution=f"while read -r x; do bash {s} $x; done < {a} > {out}",
    )


def arguments_3(d: Draw) -> Recipe:
    s, out, (v, w), n = d.file("sh"), d.file(), d.words(2), d.number(2, 5)
    flag_word, flag_number = d.rng.choice(("-n", "-w", "-k")), d.rng.choice(("-c", "-r", "-t"))
    body = (
        f"#!/bin/bash\n# usage: {s} {flag_word} WORD {flag_number} TIMES -o FILE\nwhile [ $# -gt 0 ]; do\n  case $1 in\n"
        f"    {flag_word}) word=$2 ;;\n    {flag_number}) times=$2 ;;\n    -o) out=$2 ;;\n    *) echo bad flag >&2; exit 2 ;;\n"
        f'  esac\n  shift 2\ndone\n[ -n "$word" ] && [ -n "$times" ] && [ -n "$out" ] || exit 1\n'
        f'for i in $(seq "$times"); do echo "{v} $word"; done > "$out"\n'
    )
    return Recipe(
        wordings=(
            f"Read the usage comment in {s}, then run it so that it writes the word {w} {n} times to {out}. Write the exit "
            "code to "
            f"code.txt and the number of lines of {out} to lines.txt.",
            f"Look at {s} to learn its options. Run it with the word {w}, {n} times, output file {out}. Save its exit code in "
            f"code.txt and the line count of {out} in lines.txt.",
            f"The script {s} explains its flags in a comment. Use it to produce {out} with the word {w} and {n} "
            "repetitions; then "
            "write the exit code to code.txt and the number of produced lines to lines.txt.",
            f"Find out how {s} is called and have it fill {out} with {n} lines for the word {w}. code.txt gets its exit "
            "status, "
            f"lines.txt the line count of {out}.",
            f"With the right flags (see its source) {s} writes {out}: word {w}, {n} times. Do it, and note the exit status in "
            "code.txt and the resulting line count in lines.txt.",
        ),
        files={s: body},
        checks={
            "output_exists": exists(out),
            "output_right": same(out, "\n".join([f"{v} {w}"] * n)),
            "code_right": same("code.txt", "0"),
            "lines_right": f'[ "$(tr -d "[:space:]" < lines.txt)" = {n} ]',
            "script_kept": f"grep -q 'usage: {s}' {s}",
        },
        solution=f"bash {s} {flag_word} {w} {flag_number} {n} -o {out}\necho $? > code.txt\nwc -l < {out} > lines.txt",
    )


def environment_1(d: Draw) -> Recipe:
    s, out, w = d.file("sh"), d.file(), d.word()
    name = d.rng.choice(("NAME", "COLOR", "CITY", "USERNAME"))
    body = f'#!/bin/bash\necho "{name.lower()} is ${name}"\n'
    return Recipe(
        wordings=(
            f"Run {s} with the environment variable {name} set to {w} and write the output to {out}.",
            f"Set {name}={w}, run {s} and save the output to {out}.",
            f"Run {s} with {name}={w} in its environment and save what it prints in {out}.",
            f"Execute {s} with the variable {name} being {w}; store its output in {out}.",
            f"{out} should hold what {s} prints when {name} is {w} in the environment.",
        ),
        files={s: body},
        checks={
            "output_exists": exists(out),
            "value_used": f"grep -qw {w} {out}",
            "output_right": same(out, f"{name.lower()} is {w}"),
            "script_kept": same(s, body),
        },
        solution=f"{name}={w} bash {s} > {out}",
    )


def environment_2(d: Draw) -> Recipe:
    s, env, out, (v, w) = d.file("sh"), d.file("env"), d.file(), d.words(2)
    body = '#!/bin/bash\necho "$FIRST-$SECOND"\n'
    return Recipe(
        wordings=(
            f"Create {env} that exports FIRST={v} and SECOND={w}. Source it, run {s} and write the output to {out}.",
            f"Write a file {env} with the lines export FIRST={v} and export SECOND={w}, source it, and save the output of "
            f"{s} in "
            f"{out}.",
            f"Make {env} export the variables FIRST ({v}) and SECOND ({w}). With these set, run {s} and save its output to {out}.",
            f"A file {env} is needed that, when sourced, exports FIRST as {v} and SECOND as {w}. {out} gets what {s} prints then.",
            f"Put exports of FIRST (value {v}) and SECOND (value {w}) into {env}; use it to run {s}, output into {out}.",
        ),
        files={s: body},
        checks={
            "settings_exist": exists(env),
            "settings_export": f"[ \"$(. ./{env}; run bash -c 'echo $FIRST-$SECOND')\" = {v}-{w} ]",
            "output_right": same(out, f"{v}-{w}"),
            "script_kept": same(s, body),
        },
        solution=f"echo export FIRST={v} > {env}\necho export SECOND={w} >> {env}\n. ./{env}\nbash {s} > {out}",
    )


def environment_3(d: Draw) -> Recipe:
    s, a, out, values = d.file("sh"), d.file(), d.file(), d.words(3)
    names = d.rng.sample(("MODE", "REGION", "OWNER", "STAGE", "GROUP"), 3)
    body = "#!/bin/bash\n" + "".join(f': "${{{name}:?is not set}}"\n' for name in names)
    body += f'echo "${names[0]}/${names[1]}/${names[2]}"\n'
    lines = [f"{name.lower()}: {value}" for name, value in zip(names, values, strict=True)]
    d.rng.shuffle(lines)
    return Recipe(
        wordings=(
            f"{s} needs some environment variables; look which. Take their values from {a}, run it, write its output to "
            f"{out}, and "
            "write the sorted names of the variables, one per line, to needed.txt.",
            f"Find out which environment variables {s} uses. Set them to the values in {a}, run {s} and save the output in "
            f"{out}. "
            "List the variables, sorted, one per line, in needed.txt.",
            f"Read {s} to see its required variables and {a} for their values. Run {s} with them, output to {out}; write the "
            "variable names, one per line and sorted, to needed.txt.",
            f"The script {s} fails unless certain variables are set. {a} has the values. Get its output into {out}, and "
            "the sorted "
            "variable names, one per line, into needed.txt.",
            f"Make {s} work with the settings of {a} as environment variables (the script shows their names). Output: "
            f"{out}. The "
            "names, sorted, one on each line: needed.txt.",
        ),
        files={s: body, a: "\n".join(lines) + "\n"},
        checks={
            "output_exists": exists(out),
            "output_right": same(out, "/".join(values)),
            "names_right": same("needed.txt", "\n".join(sorted(names))),
            "script_kept": same(s, body),
        },
        solution=f"export {' '.join(f'{n}={v}' for n, v in zip(names, values, strict=True))}\nbash {s} > {out}\n"
        f"printf '%s\\n' {' '.join(sorted(names))} > needed.txt",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "archive": (archive_1, archive_2, archive_3),
    "git": (git_1, git_2, git_3),
    "processes": (processes_1, processes_2, processes_3),
    "arguments": (arguments_1, arguments_2, arguments_3),
    "environment": (environment_1, environment_2, environment_3),
}
