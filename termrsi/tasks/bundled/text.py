"""Families on text: sort, count, lines, search, redirect."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, same


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def sort_1(d: Draw) -> Recipe:
    a, b, words = d.file(), d.file(), d.words(6)
    if words == sorted(words):
        words.reverse()
    return Recipe(
        wordings=(
            f"Sort the lines of {a} and write the result to {b}.",
            f"Sort {a} and save the output to {b}.",
            f"Write the sorted lines of {a} to {b}.",
            f"Put the lines of {a} in alphabetical order into {b}.",
            f"{b} should hold the lines of {a}, sorted.",
            f"Please sort {a} into {b}.",
            f"Sort the file {a} and write it to {b}.",
            f"Use sort to write the lines of {a} to {b} in order.",
            f"Save a sorted version of {a} as {b}.",
            f"Order the lines of {a} and store them in {b}.",
            f"Sort the lines in {a}. Save them in {b}.",
            f"Write {a}, sorted, to {b}.",
            f"Put the sorted lines of {a} into {b}.",
            f"Create {b} with the lines of {a} in sorted order.",
            f"A sorted copy of {a} is needed in {b}.",
        ),
        files={a: _joined(words)},
        checks={
            "output_exists": exists(b),
            "all_lines_there": f'[ "$(sort {b})" = "$(sort {a})" ]',
            "output_sorted": same(b, _joined(sorted(words))),
            "input_kept": same(a, _joined(words)),
        },
        solution=f"LC_ALL=C sort {a} > {b}",
    )


def sort_2(d: Draw) -> Recipe:
    a, b, c, words = d.file(), d.file(), d.file(), d.words(4)
    lines = words + d.rng.choices(words, k=4)
    d.rng.shuffle(lines)
    return Recipe(
        wordings=(
            f"Write the sorted unique lines of {a} to {b}, and the number of unique lines to {c}.",
            f"Sort {a}, remove duplicate lines and save it as {b}. Write how many lines {b} has to {c}.",
            f"Save the lines of {a} without duplicates, sorted, in {b} and count them into {c}.",
            f"{b} should hold each different line of {a} once, in alphabetical order; {c} the number of those lines.",
            f"Remove repeated lines from {a}: sorted result in {b}, its line count in {c}.",
        ),
        files={a: _joined(lines)},
        checks={
            "output_exists": exists(b),
            "unique_sorted": same(b, _joined(sorted(words))),
            "number_right": f'[ "$(tr -d " " < {c})" = {len(words)} ]',
            "input_kept": same(a, _joined(lines)),
        },
        solution=f"LC_ALL=C sort -u {a} > {b}\nwc -l < {b} > {c}",
    )


def sort_3(d: Draw) -> Recipe:
    a, b, c, words = d.file(), d.file(), d.file(), d.words(5)
    lines = [word for word, times in zip(words, (7, 5, 3, 2, 1), strict=True) for _ in range(times)]
    d.rng.shuffle(lines)
    return Recipe(
        wordings=(
            f"Find the three most frequent lines of {a}. Write them to {b}, most frequent first, without counts, and write the "
            f"line that occurs only once to {c}.",
            f"Write the three most common lines of {a} to {b} (most common first, only the words). Write the line that appears "
            f"just once to {c}.",
            f"Count how often each line occurs in {a}. The top three go to {b}, highest count first, without numbers; the line "
            f"with count one goes to {c}.",
            f"Rank the lines of {a} by how often they occur: {b} gets the first three in that order (no counts), {c} the only "
            "line that is not repeated.",
            f"From {a}, put the three lines with the most repetitions into {b} in falling order, words only, and the single "
            f"unrepeated line into {c}.",
        ),
        files={a: _joined(lines)},
        checks={
            "outputs_exist": exists(b, c),
            "first_right": f'[ "$(head -n 1 {b})" = {words[0]} ]',
            "top_three": same(b, _joined(words[:3])),
            "single_right": same(c, words[4]),
            "input_kept": same(a, _joined(lines)),
        },
        solution=f"sort {a} | uniq -c | sort -rn | head -n 3 | awk '{{print $2}}' > {b}\nsort {a} | uniq -u > {c}",
    )


def count_1(d: Draw) -> Recipe:
    a, b, n = d.file(), d.file(), d.number(4, 19)
    content = d.text(n)
    return Recipe(
        wordings=(
            f"Count the lines of {a} and write the number to {b}.",
            f"Write the number of lines in {a} to {b}.",
            f"Count how many lines {a} has and save the number in {b}.",
            f"How many lines are in {a}? Store the number in {b}.",
            f"Put the line count of {a}, only the number, into {b}.",
        ),
        files={a: content},
        checks={
            "output_exists": exists(b),
            "number_there": f"grep -qw {n} {b}",
            "only_number": f'[ "$(tr -d "[:space:]" < {b})" = {n} ]',
            "input_kept": same(a, content),
        },
        solution=f"wc -l < {a} > {b}",
    )


def count_2(d: Draw) -> Recipe:
    a, b, x, y = d.file(), d.file(), d.file(), d.file()
    m, n = d.number(3, 9), d.number(10, 19)
    one, two = d.text(m), d.text(n)
    return Recipe(
        wordings=(
            f"Write the number of words of {a} to {x} and the number of lines of {b} to {y}.",
            f"Count the words in {a} and save the number in {x}. Count the lines in {b} and save the number in {y}.",
            f"Save the word count of {a} in {x} and the line count of {b} in {y}.",
            f"Two numbers are needed: how many words {a} has, in {x}, and how many lines {b} has, in {y}.",
            f"{x} should hold the word total of {a}; {y} should hold the line total of {b}. Numbers only.",
        ),
        files={a: one, b: two},
        checks={
            "outputs_exist": exists(x, y),
            "words_right": f'[ "$(tr -d "[:space:]" < {x})" = {2 * m} ]',
            "lines_right": f'[ "$(tr -d "[:space:]" < {y})" = {n} ]',
            "inputs_kept": both(same(a, one), same(b, two)),
        },
        solution=f"wc -w < {a} > {x}\nwc -l < {b} > {y}",
    )


def count_3(d: Draw) -> Recipe:
    folder, names, sizes = d.word(), sorted(d.words(3)), [d.number(2, 9) for _ in range(3)]
    texts = {f"{folder}/{name}.txt": d.text(size) for name, size in zip(names, sizes, strict=True)}
    expected = _joined([f"{name}.txt {size}" for name, size in zip(names, sizes, strict=True)])
    return Recipe(
        wordings=(
            f"For each .txt file in {folder} write a line NAME COUNT (file name without folder, number of lines) to "
            "counts.list, "
            "sorted by name. Write the sum of the counts to total.list.",
            f"Make counts.list with one line per .txt file of {folder}: its name, a space and its number of lines, sorted by "
            "name. Write the total number of lines to total.list.",
            f"Count the lines of every .txt file in {folder}. Save lines like name.txt 5, sorted by name, in counts.list "
            "and the "
            "sum of all counts in total.list.",
            f"counts.list shall show for every .txt file of {folder}, in alphabetical order, its name and line count with "
            "a space "
            "between; total.list shall show the sum.",
            f"Report line counts of {folder}'s .txt files: NAME SPACE NUMBER per line, ordered by name, in counts.list; "
            "overall sum "
            "in total.list.",
        ),
        files=texts | {f"{folder}/skip.log": "no\n"},
        checks={
            "outputs_exist": exists("counts.list", "total.list"),
            "names_there": both(*(f"grep -q {name}.txt counts.list" for name in names)),
            "counts_right": same("counts.list", expected),
            "total_right": same("total.list", str(sum(sizes))),
            "inputs_kept": both(*(same(path, content) for path, content in texts.items())),
        },
        solution=f'cd {folder}\nfor f in *.txt; do echo "$f $(wc -l < $f)"; done > ../counts.list\n'
        "cat *.txt | wc -l > ../total.list",
    )


def lines_1(d: Draw) -> Recipe:
    a, b, n = d.file(), d.file(), d.number(2, 6)
    content = d.text(n + d.number(3, 6))
    return Recipe(
        wordings=(
            f"Write the first {n} lines of {a} to {b}.",
            f"Save the first {n} lines of {a} in {b}.",
            f"Copy the first {n} lines of {a} to the file {b}.",
            f"Take the top {n} lines of {a} and store them in {b}.",
            f"{b} should hold only the first {n} lines of {a}.",
        ),
        files={a: content},
        checks={
            "output_exists": exists(b),
            "number_of_lines": f'[ "$(wc -l < {b})" = {n} ]',
            "right_lines": same(b, _joined(content.splitlines()[:n])),
            "input_kept": same(a, content),
        },
        solution=f"head -n {n} {a} > {b}",
    )


def lines_2(d: Draw) -> Recipe:
    a, b, m, n = d.file(), d.file(), d.number(1, 3), d.number(1, 3)
    content = d.text(m + n + d.number(3, 6))
    rows = content.splitlines()
    return Recipe(
        wordings=(
            f"Write the first {m} lines of {a} followed by its last {n} lines to {b}.",
            f"Save the first {m} and then the last {n} lines of {a} in {b}.",
            f"Create {b} from the first {m} lines and the last {n} lines of {a}, in this order.",
            f"{b} should start with the top {m} lines of {a} and end with its bottom {n} lines, nothing between.",
            f"Join the opening {m} lines and the closing {n} lines of {a} into {b}.",
        ),
        files={a: content},
        checks={
            "output_exists": exists(b),
            "starts_right": f'[ "$(head -n 1 {b})" = "{rows[0]}" ]',
            "right_lines": same(b, _joined(rows[:m] + rows[-n:])),
            "input_kept": same(a, content),
        },
        solution=f"head -n {m} {a} > {b}\ntail -n {n} {a} >> {b}",
    )


def lines_3(d: Draw) -> Recipe:
    a, b, c = d.file(), d.file(), d.file()
    low = d.number(2, 4)
    high = low + d.number(2, 3)
    content = d.text(high + 3)
    rows = content.splitlines()
    part = rows[low - 1 : high]
    return Recipe(
        wordings=(
            f"Write lines {low} to {high} of {a} to {b} in reverse order, and all the other lines of {a} in their order to {c}.",
            f"Take lines {low} through {high} out of {a}: save them reversed (last first) in {b}, and save the remaining "
            "lines in "
            f"{c}. Do not change {a}.",
            f"Save lines {low}-{high} of {a}, last one first, as {b}. Save {a} without these lines as {c}.",
            f"{b} gets lines {low} to {high} of {a} from bottom to top; {c} gets everything of {a} that is not in {b}.",
            f"Split {a}: the block from line {low} to line {high}, upside down, into {b}; what is left, unchanged, into {c}.",
        ),
        files={a: content},
        checks={
            "outputs_exist": exists(b, c),
            "block_lines": f'[ "$(sort {b})" = "$(sed -n {low},{high}p {a} | sort)" ]',
            "block_reversed": same(b, _joined(part[::-1])),
            "rest_right": same(c, _joined(rows[: low - 1] + rows[high:])),
            "input_kept": same(a, content),
        },
        solution=f"sed -n {low},{high}p {a} | tac > {b}\nsed {low},{high}d {a} > {c}",
    )


def search_1(d: Draw) -> Recipe:
    a, b, w, others = d.file(), d.file(), d.word(), d.words(3)
    rows = [f"{d.rng.choice(others)} {d.number(10, 99)}" for _ in range(5)] + [f"{w} {d.number(10, 99)}" for _ in range(3)]
    d.rng.shuffle(rows)
    hits = [row for row in rows if row.startswith(w)]
    return Recipe(
        wordings=(
            f"Write the lines of {a} that contain {w} to {b}.",
            f"Find all lines with the word {w} in {a} and save them to {b}.",
            f"Search {a} for {w} and write the matching lines to {b}.",
            f"Store every line of {a} in which {w} occurs in {b}.",
            f"{b} should hold exactly the lines of {a} that mention {w}.",
        ),
        files={a: _joined(rows)},
        checks={
            "output_exists": exists(b),
            "all_matches": both(*(f'grep -qF "{row}" {b}' for row in hits)),
            "right_lines": same(b, _joined(hits)),
            "input_kept": same(a, _joined(rows)),
        },
        solution=f"grep {w} {a} > {b}",
    )


def search_2(d: Draw) -> Recipe:
    folder, sub, out, (p, q, r) = d.word(), d.word(), d.file(), d.words(3)
    hits = sorted((f"{folder}/{p}.md", f"{folder}/{sub}/{q}.md"))
    return Recipe(
        wordings=(
            f"Find all .md files under {folder} and write their paths, sorted, to {out}.",
            f"Write the sorted list of paths of the .md files in {folder} and its subfolders to {out}.",
            f"Search {folder} and its subdirectories for files ending in .md and save their sorted paths in {out}.",
            f"{out} should list every .md file at any depth of {folder}, one path ({folder}/...) per line, in sorted order.",
            f"List the Markdown files (.md) of the tree {folder} with their paths, sorted, in {out}.",
        ),
        files={hits[0]: "# a\n", hits[1]: "# b\n", f"{folder}/{r}.txt": "t\n", f"{folder}/{sub}/{r}.log": "l\n"},
        checks={
            "output_exists": exists(out),
            "matches_there": both(*(f"grep -q {hit.rsplit('/', 1)[1]} {out}" for hit in hits)),
            "no_others": f"[ -f {out} ] && ! grep -q {r} {out}",
            "paths_sorted": f"[ \"$(sed 's#^/app/##; s#^\\./##' {out})\" = \"$(printf '%s\\n' {' '.join(hits)})\" ]",
        },
        solution=f"find {folder} -name '*.md' | LC_ALL=C sort > {out}",
    )


def search_3(d: Draw) -> Recipe:
    folder, (p, q, r, s), w = d.word(), d.words(4), d.word()
    code = f"{w}-{d.number(1000, 9999)}"
    paths = [f"{folder}/{p}/{q}.txt", f"{folder}/{r}/{s}.txt", f"{folder}/{q}.txt", f"{folder}/{r}/{p}.txt"]
    d.rng.shuffle(paths)
    files = {path: d.text(3) for path in paths}
    files[paths[0]] += f"code: {code}\n"
    return Recipe(
        wordings=(
            f"One file under {folder} contains a line that starts with code:. Write the path of that file to path.txt, the "
            "value "
            "after code: to code.txt, and copy the file to found.txt.",
            f"Find the file under {folder} with a code: line. Save its path in path.txt, the code itself in code.txt and a "
            "copy of "
            "the file as found.txt.",
            f"Search {folder} for the file with the line code: VALUE. Write its path to path.txt and VALUE to code.txt, "
            "and make "
            "a copy of the file called found.txt.",
            f"Somewhere below {folder} a file has a line beginning with code:. path.txt shall hold its path, code.txt what "
            "follows "
            "code:, found.txt a copy of it.",
            f"A code is hidden in a file of the tree {folder}, in a line code: VALUE. Record the file's path in path.txt "
            "and VALUE "
            "in code.txt, and duplicate the file as found.txt.",
        ),
        files=files,
        checks={
            "outputs_exist": exists("path.txt", "code.txt", "found.txt"),
            "path_right": f"[ \"$(sed 's#^/app/##; s#^\\./##' path.txt)\" = {paths[0]} ]",
            "code_right": same("code.txt", code),
            "copy_right": same("found.txt", files[paths[0]]),
            "files_kept": both(*(same(path, content) for path, content in files.items())),
        },
        solution=f"f=$(grep -rl '^code:' {folder})\necho $f > path.txt\ngrep '^code:' $f | cut -d' ' -f2 > code.txt\n"
        "cp $f found.txt",
    )


def redirect_1(d: Draw) -> Recipe:
    a, w = d.file(), d.word()
    return Recipe(
        wordings=(
            f"Write the word {w} to the file {a}.",
            f"Create the file {a} with the text {w}.",
            f"Create a file named {a} that contains the word {w}.",
            f"Put the word {w} into a new file called {a}.",
            f"A file {a} is needed, containing just the word {w}.",
            f"Please write {w} to {a}.",
            f"Write {w} into the file {a}.",
            f"Save the word {w} in {a}.",
            f"Store the text {w} in a file called {a}.",
            f"Let the file {a} hold the word {w}.",
            f"Make a file {a} with the word {w} in it.",
            f"Use echo to write {w} to {a}.",
            f"Create {a} containing {w}.",
            f"Make a new file {a} whose text is {w}.",
            f"The word {w} should be in a file named {a}.",
        ),
        files={"readme.txt": "work folder\n"},
        checks={"file_exists": exists(a), "word_there": f"grep -qw {w} {a}", "only_the_word": same(a, w)},
        solution=f"echo {w} > {a}",
    )


def redirect_2(d: Draw) -> Recipe:
    s, out, err, (v, w) = d.file("sh"), d.file(), d.file(), d.words(2)
    body = f"#!/bin/bash\necho {v}\necho {w} >&2\n"
    return Recipe(
        wordings=(
            f"Run {s} and write its standard output to {out} and its standard error to {err}.",
            f"Run the script {s}. Save its output in {out} and its errors in {err}.",
            f"Run {s} with stdout redirected to {out} and stderr redirected to {err}.",
            f"Execute {s} such that normal output lands in {out} and error output in {err}.",
            f"The script {s} prints to both streams: keep stdout in {out}, stderr in {err}.",
        ),
        files={s: body},
        checks={
            "outputs_exist": exists(out, err),
            "output_right": same(out, v),
            "errors_right": same(err, w),
            "script_kept": same(s, body),
        },
        solution=f"bash {s} > {out} 2> {err}",
    )


def redirect_3(d: Draw) -> Recipe:
    s, log, (v, w), code = d.file("sh"), d.file("log"), d.words(2), d.number(2, 9)
    lines = [f"{v} {d.number(10, 99)}" for _ in range(3)]
    body = "#!/bin/bash\n" + "".join(f"echo {x}\n" for x in lines) + f"echo {w} >&2\nexit {code}\n"
    return Recipe(
        wordings=(
            f"Run {s} once. Write its standard output to out.txt, its standard error to err.txt, its exit code to "
            "code.txt, and the "
            f"number of lines of out.txt to {log}.",
            f"Run the script {s} and save four things: output in out.txt, errors in err.txt, exit code in code.txt, and "
            "how many "
            f"lines out.txt has in {log}.",
            f"Record a run of {s}: stdout in out.txt, stderr in err.txt, the exit status in code.txt and the line count of "
            f"out.txt in {log}.",
            f"Execute {s}; out.txt shall hold what it prints, err.txt its error messages, code.txt its exit status, {log} the "
            "number of lines in out.txt.",
            f"Document {s}: keep its normal output (out.txt), its error output (err.txt), its exit code (code.txt), and "
            "the count "
            f"of lines in out.txt ({log}).",
        ),
        files={s: body},
        checks={
            "output_right": same("out.txt", _joined(lines)),
            "errors_right": same("err.txt", w),
            "code_right": same("code.txt", str(code)),
            "number_right": f'[ "$(tr -d "[:space:]" < {log})" = {len(lines)} ]',
            "script_kept": same(s, body),
        },
        solution=f"bash {s} > out.txt 2> err.txt || echo $? > code.txt\nwc -l < out.txt > {log}",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "sort": (sort_1, sort_2, sort_3),
    "count": (count_1, count_2, count_3),
    "lines": (lines_1, lines_2, lines_3),
    "search": (search_1, search_2, search_3),
    "redirect": (redirect_1, redirect_2, redirect_3),
}
