"""Families that repair small programs: shell_repair, python_repair."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, prints, same


def shell_repair_1(d: Draw) -> Recipe:
    s, w, wrong = d.file("sh"), d.word(), d.rng.choice(("ehco", "eco", "ecko", "echoo"))
    good = f"#!/bin/bash\necho {w}\n"
    return Recipe(
        wordings=(
            f"Replace {wrong} with echo in {s}.",
            f"Fix the typo in {s}: replace {wrong} with echo.",
            f"In the file {s}, change {wrong} to echo.",
            f"The script {s} says {wrong} where echo is meant. Correct it.",
            f"Correct the misspelt {wrong} in {s} to echo.",
        ),
        files={s: f"#!/bin/bash\n{wrong} {w}\n"},
        checks={
            "typo_gone": f"[ -s {s} ] && ! grep -qw {wrong} {s}",
            "script_runs": prints(f"bash {s}", w),
            "script_right": same(s, good),
        },
        solution=f"sed -i 's/{wrong}/echo/' {s}",
    )


def shell_repair_2(d: Draw) -> Recipe:
    s, out, m, n = d.file("sh"), d.file(), d.number(20, 60), d.number(2, 19)
    return Recipe(
        wordings=(
            f"{s} should print the sum of its two arguments, but it subtracts. Fix it, then write its output for {m} and "
            f"{n} to "
            f"{out}.",
            f"The script {s} prints $1 - $2. Change it to print $1 + $2, then run it with {m} {n} and save the output to {out}.",
            f"Fix {s}: it must add its two arguments, not subtract. Save what it prints for {m} {n} in {out}.",
            f"{s} is meant to add two numbers and uses minus by mistake. Repair it; {out} gets its result for {m} {n}.",
            f"Make {s} add (it subtracts now), and put its answer for {m} and {n} into {out}.",
        ),
        files={s: "#!/bin/bash\necho $(($1 - $2))\n"},
        checks={
            "adds": prints(f"bash {s} {m} {n}", str(m + n)),
            "adds_others": both(prints(f"bash {s} 7 5", "12"), prints(f"bash {s} 0 3", "3")),
            "output_exists": exists(out),
            "output_right": same(out, str(m + n)),
        },
        solution=f"sed -i 's/-/+/' {s}\nbash {s} {m} {n} > {out}",
    )


def shell_repair_3(d: Draw) -> Recipe:
    s, a, (v, w), n = d.file("sh"), d.file(), d.words(2), d.number(3, 6)
    rows = [f"{v} {i}" for i in range(n)] + [f"{w} {i}" for i in range(2)]
    d.rng.shuffle(rows)
    content = "\n".join(rows) + "\n"
    usage = "# prints how many lines of FILE contain WORD: count WORD FILE"
    broken = f'#!/bin/bash\n{usage}\nif [ $# -ne 2 ]; then\n  echo usage\n  exit 1\ngrep -c "$2" "$1"\n'
    return Recipe(
        wordings=(
            f"{s} should be called as ./{s} WORD FILE and print how many lines of FILE contain WORD. It has several faults "
            "and is not "
            f"executable. Repair it and write its output for {v} and {a} to result.txt.",
            f"Repair {s}: ./{s} WORD FILE must print the number of lines of FILE with WORD, and with a wrong number of "
            "arguments print "
            f"usage and exit 1. Make it executable. Save its output for {v} {a} in result.txt.",
            f"The script {s} is broken in more than one way. It must be executable and ./{s} WORD FILE must print the "
            "count of lines "
            f"in FILE that contain WORD. Fix it and save the result for {v} and {a} in result.txt.",
            f"Get {s} to work: run as ./{s} WORD FILE it counts the lines of FILE containing WORD. Syntax, argument order "
            "and mode are "
            f"wrong. result.txt shall hold its answer for {v} {a}.",
            f"Debug {s}, a counter of lines with a word (usage: ./{s} WORD FILE), until it runs as an executable, and put "
            "what it says "
            f"about {v} in {a} into result.txt.",
        ),
        files={s: broken, a: content},
        setup=(f"chmod 644 {s}",),
        checks={
            "syntax_right": f"bash -n {s}",
            "is_executable": f"[ -x {s} ]",
            "counts": both(prints(f"./{s} {v} {a}", str(n)), prints(f"./{s} {w} {a}", "2")),
            "usage_kept": f"[ -x {s} ] && run ./{s} one | grep -q usage && ! run ./{s} one",
            "result_right": same("result.txt", str(n)),
            "data_kept": same(a, content),
        },
        solution=f"""sed -i 's/^  exit 1/  exit 1\\nfi/; s/"$2" "$1"/"$1" "$2"/' {s}\n"""
        f"chmod +x {s}\n./{s} {v} {a} > result.txt",
    )


def python_repair_1(d: Draw) -> Recipe:
    p, w, wrong = d.file("py"), d.word(), d.rng.choice(("pritn", "prnt", "pirnt", "prin"))
    good = f'print("{w}")\n'
    return Recipe(
        wordings=(
            f"Replace {wrong} with print in {p}.",
            f"Fix the typo in {p}: replace {wrong} with print.",
            f"In the file {p}, change {wrong} to print.",
            f"The program {p} says {wrong} where print is meant. Correct it.",
            f"Correct the misspelt {wrong} in {p} to print.",
        ),
        files={p: f'{wrong}("{w}")\n'},
        checks={
            "typo_gone": f"[ -s {p} ] && ! grep -qw {wrong} {p}",
            "program_runs": prints(f"python3 {p}", w),
            "text_right": same(p, good),
        },
        solution=f"sed -i 's/{wrong}/print/' {p}",
    )


def python_repair_2(d: Draw) -> Recipe:
    p, out, m, n = d.file("py"), d.file(), d.number(3, 9), d.number(11, 19)
    body = f"def area(a, b):\n    return a + b\n\n\nif __name__ == '__main__':\n    print(area({m}, {n}))\n"
    module = p.removesuffix(".py")
    other = f"python3 -c 'import {module}; print({module}.area(6, 7))'"
    return Recipe(
        wordings=(
            f"The function area in {p} must multiply a and b, but it adds them. Fix it and write the program's output to {out}.",
            f"In {p} area returns a + b. Change it to a * b, then run {p} and save the output to {out}.",
            f"Fix area in {p}: it should return the product of a and b. Save the output of {p} in {out}.",
            f"{p} computes an area by adding. Make it multiply; {out} gets what the corrected program prints.",
            f"The area function of {p} is wrong (a sum in place of a product). Correct it and store its printed result in {out}.",
        ),
        files={p: body},
        checks={
            "prints_product": prints(f"python3 {p}", str(m * n)),
            "multiplies_others": prints(other, "42"),
            "output_exists": exists(out),
            "output_right": same(out, str(m * n)),
        },
        solution=f"sed -i 's/a + b/a * b/' {p}\npython3 {p} > {out}",
    )


def python_repair_3(d: Draw) -> Recipe:
    lib, p, a, out = d.word(), d.file("py"), d.file(), d.file()
    numbers = [d.number(1, 40) for _ in range(5)]
    content = "\n".join(map(str, numbers)) + "\n"
    library = "def mean(values):\n    return sum(values) / (len(values) - 1)\n\n\ndef biggest(values):\n    return min(values)\n"
    program = (
        f"import sys\n\nfrom {lib} import average, biggest\n\nwith open(sys.argv[1]) as file:\n    values = [int(line) for "
        "line in file]\n"
        "print(round(average(values), 2) if values else 0, biggest(values) if values else 0)\n"
    )
    shown = f"{round(sum(numbers) / 5, 2)} {max(numbers)}"
    use = f"python3 -c 'import {lib}; print({lib}.average([1, 2, 6]), {lib}.biggest([4, 9, 5]))'"
    return Recipe(
        wordings=(
            f"python3 {p} {a} should print the mean and the largest of the numbers in {a}, but fails. The faults are in "
            f"{lib}.py: keep "
            f"{p} as it is. Repair {lib}.py and write the program's output to {out}.",
            f"Fix {lib}.py such that {p}, which you must not change, prints the average and the maximum of the numbers in "
            f"{a}. Save "
            f"the output of python3 {p} {a} in {out}.",
            f"{p} imports functions average and biggest from {lib}.py, where names and results are wrong. Repair {lib}.py "
            "only, then "
            f"save the output of python3 {p} {a} to {out}.",
            f"The library {lib}.py has bugs: {p} cannot import average, and mean and maximum come out wrong. Correct it, "
            f"leave {p} "
            f"alone, and put the output of python3 {p} {a} into {out}.",
            f"Make python3 {p} {a} print the true average and maximum by correcting {lib}.py ({p} stays untouched); record "
            "the output in "
            f"{out}.",
        ),
        files={f"{lib}.py": library, p: program, a: content},
        checks={
            "program_runs": f"run python3 {p} {a}",
            "program_right": prints(f"python3 {p} {a}", shown),
            "library_right": prints(use, "3.0 9"),
            "output_right": same(out, shown),
            "program_kept": same(p, program),
        },
        solution=f"sed -i 's/mean/average/; s/(len(values) - 1)/len(values)/; s/min/max/' {lib}.py\npython3 {p} {a} > {out}",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "shell_repair": (shell_repair_1, shell_repair_2, shell_repair_3),
    "python_repair": (python_repair_1, python_repair_2, python_repair_3),
}
