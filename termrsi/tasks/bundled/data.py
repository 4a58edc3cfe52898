"""Families on data and settings: logs, csv, json, config."""

import json

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, exists, flat, same

LEVELS = ("ERROR", "WARN", "INFO")


def _log(d: Draw, errors: int, warnings: int, infos: int, services: list[str]) -> list[str]:
    kinds = ["ERROR"] * errors + ["WARN"] * warnings + ["INFO"] * infos
    d.rng.shuffle(kinds)
    return [f"10:{i:02d} {kind} {d.rng.choice(services)} {d.number(100, 999)}" for i, kind in enumerate(kinds)]


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def logs_1(d: Draw) -> Recipe:
    a, b, n = d.file("log"), d.file(), d.number(2, 8)
    content = _joined(_log(d, n, d.number(1, 3), d.number(3, 6), d.words(2)))
    return Recipe(
        wordings=(
            f"Count the lines of {a} that contain ERROR and write the number to {b}.",
            f"Write the number of lines with ERROR in {a} to {b}.",
            f"Count how many lines of {a} contain ERROR. Save the number in {b}.",
            f"How many ERROR lines does {a} have? Store the number in {b}.",
            f"Put the count of ERROR lines of {a} into {b}.",
        ),
        files={a: content},
        checks={
            "output_exists": exists(b),
            "number_there": f"grep -qw {n} {b}",
            "only_number": f'[ "$(tr -d "[:space:]" < {b})" = {n} ]',
            "log_kept": same(a, content),
        },
        solution=f"grep -c ERROR {a} > {b}",
    )


def logs_2(d: Draw) -> Recipe:
    a, b, c, n, warnings = d.file("log"), d.file(), d.file(), d.number(2, 3), d.number(2, 5)
    rows = _log(d, n + d.number(2, 4), warnings, 4, d.words(2))
    last = [row for row in rows if "ERROR" in row][-n:]
    return Recipe(
        wordings=(
            f"Write the last {n} ERROR lines of {a} to {b} and the number of WARN lines to {c}.",
            f"Save the last {n} lines of {a} that contain ERROR in {b}, and the count of lines that contain WARN in {c}.",
            f"From {a}, put the final {n} ERROR lines into {b}. Count the WARN lines into {c}.",
            f"{b} should hold the {n} latest ERROR lines of {a} in their order; {c} how many WARN lines it has.",
            f"Two extracts of {a}: its last {n} ERROR lines ({b}) and its number of WARN lines ({c}).",
        ),
        files={a: _joined(rows)},
        checks={
            "outputs_exist": exists(b, c),
            "only_errors": f"[ -s {b} ] && ! grep -qv ERROR {b}",
            "right_lines": same(b, _joined(last)),
            "number_right": f'[ "$(tr -d "[:space:]" < {c})" = {warnings} ]',
            "log_kept": same(a, _joined(rows)),
        },
        solution=f"grep ERROR {a} | tail -n {n} > {b}\ngrep -c WARN {a} > {c}",
    )


def logs_3(d: Draw) -> Recipe:
    a, (bad, fair), counts = d.file("log"), d.words(2), (5, d.number(1, 4), d.number(2, 6))
    kinds = [("ERROR", bad)] * 3 + [("ERROR", fair)] * 2 + [("WARN", fair)] * counts[1] + [("INFO", fair)] * counts[2]
    d.rng.shuffle(kinds)
    rows = [f"10:{i:02d} {kind} {service} {d.number(100, 999)}" for i, (kind, service) in enumerate(kinds)]
    summary = _joined([f"{kind} {n}" for kind, n in zip(LEVELS, counts, strict=True)])
    return Recipe(
        wordings=(
            f"Summarise {a}: write the lines ERROR N, WARN N and INFO N (N = number of such lines, this order) to "
            "summary.txt, and "
            "the service (third column) with the most ERROR lines to worst.txt.",
            f"Each line of {a} is TIME LEVEL SERVICE CODE. Write to summary.txt three lines, ERROR, WARN and INFO, each "
            "with its "
            "count after a space, and to worst.txt the service with most errors.",
            f"Count the ERROR, WARN and INFO lines of {a} and write them to summary.txt as LEVEL NUMBER, one per line in this "
            "order. Write the service in column 3 that has the most ERROR lines to worst.txt.",
            f"summary.txt shall have the lines ERROR N, WARN N, INFO N for {a}, N being the counts; worst.txt the name in "
            "the third "
            "column that occurs most in ERROR lines.",
            f"Make two reports on {a}: per level (ERROR, WARN, INFO in this order, LEVEL SPACE COUNT) in summary.txt, and "
            "which "
            "service, third field, fails most with ERROR in worst.txt.",
        ),
        files={a: _joined(rows)},
        checks={
            "outputs_exist": exists("summary.txt", "worst.txt"),
            "errors_counted": f"grep -qx 'ERROR {counts[0]}' summary.txt",
            "summary_right": same("summary.txt", summary),
            "worst_right": same("worst.txt", bad),
            "log_kept": same(a, _joined(rows)),
        },
        solution=f'for l in ERROR WARN INFO; do echo "$l $(grep -c $l {a})"; done > summary.txt\n'
        f"grep ERROR {a} | awk '{{print $3}}' | sort | uniq -c | sort -rn | head -n 1 | awk '{{print $2}}' > worst.txt",
    )


def _table(d: Draw, rows: int) -> tuple[list[str], list[tuple[str, str, int]]]:
    """A table name,city,amount as lines, and its rows. Two cities; each occurs."""
    here, there = d.words(2)
    data = [(d.word(), here if i % 3 else there, d.number(10, 99)) for i in range(rows)]
    d.rng.shuffle(data)
    return ["name,city,amount"] + [f"{name},{city},{amount}" for name, city, amount in data], data


def csv_1(d: Draw) -> Recipe:
    a, b, (lines, _) = d.file("csv"), d.file(), _table(d, 5)
    column = d.number(1, 3)
    word = ("first", "second", "third")[column - 1]
    values = _joined([line.split(",")[column - 1] for line in lines])
    return Recipe(
        wordings=(
            f"Write the {word} column of {a} to {b}.",
            f"Cut the {word} column out of {a} and save it to {b}.",
            f"Save column {column} of the file {a}, separated by commas, to {b}.",
            f"Store the values of the {word} column of {a}, with the heading, in {b}.",
            f"{b} should hold just the {word} column of {a}.",
        ),
        files={a: _joined(lines)},
        checks={
            "output_exists": exists(b),
            "no_commas": f"[ -s {b} ] && ! grep -q , {b}",
            "column_right": same(b, values),
            "table_kept": same(a, _joined(lines)),
        },
        solution=f"cut -d, -f{column} {a} > {b}",
    )


def csv_2(d: Draw) -> Recipe:
    a, b, (lines, data) = d.file("csv"), d.file("csv"), _table(d, 6)
    city = data[0][1]
    chosen = [line for line in lines if f",{city}," in line]
    return Recipe(
        wordings=(
            f"Write the header line of {a} and all rows with {city} as city to {b}.",
            f"Save the header of {a}, followed by the rows that contain {city}, in {b}.",
            f"Filter {a}: keep the header and the rows with {city}, and write them to {b}.",
            f"{b} should be {a} reduced to its header and the rows whose city is {city}.",
            f"Extract the {city} rows of {a} into {b}, under the same header.",
        ),
        files={a: _joined(lines)},
        checks={
            "output_exists": exists(b),
            "header_there": f'[ "$(head -n 1 {b})" = {lines[0]} ]',
            "only_those_rows": f'[ -s {b} ] && [ "$(grep -c ,{city}, {b})" = {len(chosen)} ]',
            "rows_right": same(b, _joined([lines[0], *chosen])),
            "table_kept": same(a, _joined(lines)),
        },
        solution=f"head -n 1 {a} > {b}\ngrep ,{city}, {a} >> {b}",
    )


def csv_3(d: Draw) -> Recipe:
    a, (lines, data) = d.file("csv"), _table(d, 7)
    top = max(data, key=lambda row: row[2])
    data = [(n, c, amount + (100 if n == top[0] else 0)) for n, c, amount in data]  # no tie for the highest amount
    lines = [lines[0]] + [f"{n},{c},{amount}" for n, c, amount in data]
    total = sum(row[2] for row in data)
    ranked = _joined([f"{n},{c},{amount}" for n, c, amount in sorted(data, key=lambda row: row[0])])
    return Recipe(
        wordings=(
            f"From {a} write the sum of the amount column to total.txt, the name with the highest amount to top.txt, and "
            "the rows "
            "without header, sorted by name, to sorted.csv.",
            f"Analyse {a}: sum of amounts in total.txt, name of the row with the largest amount in top.txt, data rows "
            "sorted by "
            "name and without the header in sorted.csv.",
            f"Add up the amounts of {a} into total.txt. Write who has the highest amount to top.txt. Save the data rows, "
            "without "
            "header, in order of name as sorted.csv.",
            f"Three results from {a}: total.txt (all amounts added), top.txt (name with the greatest amount), sorted.csv "
            "(rows by "
            "name, no header).",
            f"Work through {a}. total.txt: the amounts' sum. top.txt: whose amount is largest. sorted.csv: its rows ordered by "
            "name, the heading left out.",
        ),
        files={a: _joined(lines)},
        checks={
            "outputs_exist": exists("total.txt", "top.txt", "sorted.csv"),
            "total_right": same("total.txt", str(total)),
            "top_right": same("top.txt", top[0]),
            "rows_sorted": same("sorted.csv", ranked),
            "table_kept": same(a, _joined(lines)),
        },
        solution=f"awk -F, 'NR>1 {{s+=$3}} END {{print s}}' {a} > total.txt\n"
        f"tail -n +2 {a} | sort -t, -k3 -rn | head -n 1 | cut -d, -f1 > top.txt\ntail -n +2 {a} | LC_ALL=C sort > sorted.csv",
    )


def json_1(d: Draw) -> Recipe:
    a, key, w = d.file("json"), d.rng.choice(("name", "title", "user", "item")), d.word()
    shown = json.dumps({key: w})
    return Recipe(
        wordings=(
            f"Write the JSON object {shown} to {a}.",
            f"Create the file {a} with the JSON {shown}.",
            f"Save {shown} in the file {a}.",
            f"Put the JSON text {shown} into a new file {a}.",
            f"{a} should contain the JSON object {shown}.",
            f"Please write {shown} to {a}.",
            f"Write {shown} into the file {a}.",
            f"Create {a} containing the JSON {shown}.",
            f"Store the object {shown} in {a}.",
            f"A file {a} with the JSON {shown} is needed.",
            f"Make the file {a} with the content {shown}.",
            f"Create a JSON file {a} that holds {shown}.",
            f"Use echo to write {shown} to {a}.",
            f"Put {shown} into {a}.",
            f"The JSON object {shown} should be saved as {a}.",
        ),
        files={"readme.txt": "work folder\n"},
        checks={
            "file_exists": exists(a),
            "key_and_value": f"grep -q {key} {a} && grep -q {w} {a}",
            "json_right": flat(a, shown),
        },
        solution=f"echo '{shown}' > {a}",
    )


def json_2(d: Draw) -> Recipe:
    a, b, (old, new), n = d.file("json"), d.file("json"), d.words(2), d.number(10, 99)
    before, after = {"name": old, "size": n, "active": False}, {"name": new, "size": n, "active": True}
    content = json.dumps(before, indent=2) + "\n"
    return Recipe(
        wordings=(
            f"Copy {a} to {b}, and in {b} change {old} to {new} and false to true.",
            f"Make a copy of {a} named {b}. In the copy replace {old} by {new} and false by true.",
            f"Write a version of {a} to {b} in which name is {new} and active is true. Do not change {a}.",
            f"{b} should equal {a}, but with the name {new} and with active set to true.",
            f"Derive {b} from {a}: name becomes {new}, active becomes true, the rest stays.",
        ),
        files={a: content},
        checks={
            "copy_exists": exists(b),
            "name_changed": f"grep -q {new} {b} && ! grep -q {old} {b}",
            "json_right": flat(b, json.dumps(after)),
            "original_kept": same(a, content),
        },
        solution=f"cp {a} {b}\nsed -i 's/{old}/{new}/; s/false/true/' {b}",
    )


def json_3(d: Draw) -> Recipe:
    a, b = d.file("csv"), d.file("json")
    rows = [(d.word(), d.number(1, 9)) for _ in range(3)]
    shown = json.dumps(dict(rows))
    total = sum(n for _, n in rows)
    return Recipe(
        wordings=(
            f"Each line of {a} is NAME,NUMBER. Write them to {b} as one JSON object from name to number, in the same "
            "order, and "
            'write {"total": SUM} to total.json, SUM being the sum of the numbers.',
            f"Convert {a} (lines NAME,NUMBER) to the JSON object in {b} with names as keys and numbers as values, in "
            "order. Also "
            'write the sum of the numbers to total.json as {"total": SUM}.',
            f"Turn the table {a}, whose lines are NAME,NUMBER, into one JSON object (name: number, same order) in {b}. Save "
            '{"total": SUM} with the sum of all numbers in total.json.',
            f"{b} shall be a single JSON object holding every NAME,NUMBER line of {a} as a member, order kept; total.json "
            "shall be "
            '{"total": SUM} with their sum.',
            f"Build two JSON files from the NAME,NUMBER lines of {a}: {b} maps each name to its number in the given order; "
            'total.json is {"total": SUM} for the sum.',
        ),
        files={a: "".join(f"{name},{n}\n" for name, n in rows)},
        checks={
            "outputs_exist": exists(b, "total.json"),
            "names_there": " && ".join(f"grep -q '\"{name}\"' {b}" for name, _ in rows),
            "object_right": flat(b, shown),
            "total_right": flat("total.json", json.dumps({"total": total})),
            "table_kept": same(a, "".join(f"{name},{n}\n" for name, n in rows)),
        },
        solution=f'b=$(sed \'s/\\(.*\\),\\(.*\\)/"\\1": \\2/\' {a} | paste -sd,)\necho "{{$b}}" > {b}\n'
        f's=$(awk -F, \'{{s+=$2}} END {{print s}}\' {a})\necho "{{\\"total\\": $s}}" > total.json',
    )


def config_1(d: Draw) -> Recipe:
    a, key, n = d.file("conf"), d.word(), d.number(10, 99)
    before = f"host=localhost\nport={d.number(1000, 9999)}\n"
    return Recipe(
        wordings=(
            f"Add the line {key}={n} to the end of {a}.",
            f"Append the line {key}={n} to {a}.",
            f"Add {key}={n} as a new last line to the file {a}.",
            f"Put one more line, {key}={n}, at the end of {a}.",
            f"The file {a} lacks the line {key}={n}. Append it.",
            f"Please append {key}={n} to {a}.",
            f"Append {key}={n} to the end of the file {a}.",
            f"Add the setting {key}={n} at the end of {a}.",
            f"Extend {a} by the line {key}={n}.",
            f"At the end of {a}, add {key}={n}.",
            f"Add the line {key}={n} to {a}.",
            f"Use echo to append {key}={n} to {a}.",
            f"Add one line to {a}: {key}={n}.",
            f"Append a line to {a} that says {key}={n}.",
            f"The setting {key}={n} is missing at the end of {a}. Add it.",
        ),
        files={a: before},
        checks={
            "line_added": f"grep -qx {key}={n} {a}",
            "file_right": same(a, f"{before}{key}={n}"),
            "old_lines_kept": f'[ "$(head -n 2 {a})" = "{before.strip()}" ]',
        },
        solution=f"echo {key}={n} >> {a}",
    )


def config_2(d: Draw) -> Recipe:
    a, b, old, new = d.file("conf"), d.file("conf"), d.number(1000, 4999), d.number(5000, 9999)
    rest = f"host={d.word()}\nmode={d.word()}\n"
    before, after = f"port={old}\n{rest}", f"port={new}\n{rest}"
    return Recipe(
        wordings=(
            f"Save a copy of {a} as {b}, then change the port in {a} from {old} to {new}.",
            f"Copy {a} to {b}. Then replace {old} by {new} in {a}.",
            f"First back up {a} as {b}, then set port={new} in {a}.",
            f"The port in {a} should be {new}. Keep the present version of the file as {b}.",
            f"Change {a} to use port {new} in place of {old}; the old file must remain available as {b}.",
        ),
        files={a: before},
        checks={
            "backup_exists": exists(b),
            "backup_right": same(b, before),
            "port_set": f"grep -qx port={new} {a}",
            "file_right": same(a, after),
        },
        solution=f"cp {a} {b}\nsed -i 's/port={old}/port={new}/' {a}",
    )


def config_3(d: Draw) -> Recipe:
    a, (v, w, x), port, new = d.file("ini"), d.words(3), d.number(1000, 4999), d.number(5000, 9999)
    before = f"[server]\nname={v}\nport={port}\ndebug=true\n\n[client]\nname={w}\nport={port}\ncache=on\n"
    after = f"[server]\nname={v}\nport={new}\n\n[client]\nname={x}\nport={port}\ncache=on\n"
    return Recipe(
        wordings=(
            f"Edit {a}: in the section [server] set port to {new} and remove the debug line; in [client] set name to {x}. "
            "Save the "
            f"old file as {a}.bak first.",
            f"Back up {a} to {a}.bak. Then in {a} change the port of [server] to {new}, delete its debug line, and change "
            "the name "
            f"of [client] to {x}.",
            f"Change {a}: port={new} under [server], no debug line there, name={x} under [client], nothing else. Keep a "
            "copy of the "
            f"original as {a}.bak.",
            f"The settings {a} need three edits: [server] port becomes {new}; [server] debug goes; [client] name becomes {x}. "
            f"{a}.bak shall hold the original.",
            f"Apply to {a}, after copying it to {a}.bak: new port {new} for [server] only, debug dropped, and client name {x}.",
        ),
        files={a: before},
        checks={
            "backup_right": same(f"{a}.bak", before),
            "server_port": f"sed -n '/server/,/client/p' {a} | grep -qx port={new}",
            "debug_gone": f"[ -s {a} ] && ! grep -q debug {a}",
            "client_name": f"sed -n '/client/,$p' {a} | grep -qx name={x}",
            "file_right": f'[ "$(grep . {a})" = "$(printf "%s\\n" {" ".join(repr(line) for line in after.split())})" ]',
        },
        solution=f"cp {a} {a}.bak\nsed -i '/server/,/client/s/port=.*/port={new}/; /debug/d; s/name={w}/name={x}/' {a}",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "logs": (logs_1, logs_2, logs_3),
    "csv": (csv_1, csv_2, csv_3),
    "json": (json_1, json_2, json_3),
    "config": (config_1, config_2, config_3),
}
