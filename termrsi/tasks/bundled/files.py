"""Families on files: create, copy, move, delete."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, gone, same


def create_1(d: Draw) -> Recipe:
    a, other = d.file(), d.file()
    kept = d.text(2)
    return Recipe(
        wordings=(
            f"Create an empty file named {a}.",
            f"Make a new empty file called {a}.",
            f"Create the empty file {a}.",
            f"Add an empty file with the name {a}.",
            f"We need an empty file, {a}. Make it.",
            f"Please create an empty file {a}.",
            f"Create {a} as an empty file.",
            f"Use touch to create {a}.",
            f"An empty file with the name {a} is missing here. Create it.",
            f"Start an empty file and call it {a}.",
            f"Create a file called {a} with nothing in it.",
            f"Make an empty file {a} in this directory.",
            f"Create a blank file named {a}.",
            f"Make sure there is an empty file called {a}.",
            f"There should be an empty file named {a} here.",
        ),
        files={other: kept},
        checks={"file_exists": f"[ -e {a} ]", "file_is_empty": f"[ -f {a} ] && [ ! -s {a} ]", "other_kept": same(other, kept)},
        solution=f"touch {a}",
    )


def create_2(d: Draw) -> Recipe:
    a, b, v, w = d.file(), d.file(), d.word(), d.word()
    return Recipe(
        wordings=(
            f"Create the file {a} with the text {v} and the file {b} with the text {w}.",
            f"Write {v} to {a} and write {w} to {b}.",
            f"Make two files: {a} should contain {v}, and {b} should contain {w}.",
            f"Two new files are needed: {a} holding the word {v}, {b} holding the word {w}.",
            f"Put the word {v} into a new file {a}, and the word {w} into a new file {b}.",
        ),
        files={"readme.txt": "work folder\n"},
        checks={
            "files_exist": exists(a, b),
            "first_text": same(a, v),
            "second_text": same(b, w),
            "readme_kept": same("readme.txt", "work folder"),
        },
        solution=f"echo {v} > {a}\necho {w} > {b}",
    )


def create_3(d: Draw) -> Recipe:
    folder, names = d.word(), sorted(d.words(3))
    listed = "list.txt"
    given = ", ".join(names)
    return Recipe(
        wordings=(
            f"Read {listed}. For each word in it create the file {folder}/WORD.txt that contains the word, then write the "
            f"number of files in {folder} to total.txt.",
            f"The file {listed} holds words. Make a folder {folder} with one file WORD.txt per word, each with its word "
            "inside, and write how many there are to total.txt.",
            f"For every line of {listed} make a file {folder}/LINE.txt whose content is that line. Write the number of these "
            "files to total.txt.",
            f"Create a folder {folder}. Every word of {listed} gets its own file WORD.txt there, containing the word itself. "
            "The count of files goes to total.txt.",
            f"Turn {listed} into files: one {folder}/WORD.txt for each word, content = the word. Store the number of files in "
            "total.txt.",
        ),
        files={listed: "\n".join(given.split(", ")) + "\n"},
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "files_exist": exists(*(f"{folder}/{n}.txt" for n in names)),
            "files_hold_words": both(*(same(f"{folder}/{n}.txt", n) for n in names)),
            "nothing_else": f'[ "$(ls {folder} | wc -l)" = {len(names)} ]',
            "total_right": same("total.txt", str(len(names))),
            "list_kept": same(listed, "\n".join(names)),
        },
        solution=f"mkdir {folder}\nwhile read -r w; do echo $w > {folder}/$w.txt; done < {listed}\nls {folder} | wc -l > total.txt",
    )


def copy_1(d: Draw) -> Recipe:
    a, b, content = d.file(), d.file(), d.text(3)
    return Recipe(
        wordings=(
            f"Copy the file {a} to {b}.",
            f"Make a copy of {a} named {b}.",
            f"Copy {a} to a new file {b}.",
            f"Duplicate the file {a} as {b}.",
            f"Save a copy of {a} under the name {b}.",
            f"Please copy {a} to {b}.",
            f"Create a copy of the file {a} and name it {b}.",
            f"Copy the contents of {a} into {b}.",
            f"Make a duplicate of {a}, called {b}.",
            f"Back up {a} as {b}.",
            f"Copy {a} and call the copy {b}.",
            f"Make {b} a copy of {a}.",
            f"Copy the file {a}. The copy is {b}.",
            f"Clone the file {a} to {b}.",
            f"We want the file {a} twice: the second one is {b}.",
        ),
        files={a: content},
        checks={"copy_exists": exists(b), "copy_is_same": same(b, content), "original_kept": same(a, content)},
        solution=f"cp {a} {b}",
    )


def copy_2(d: Draw) -> Recipe:
    a, b, folder, x, y = d.file(), d.file(), d.word(), d.text(2), d.text(3)
    return Recipe(
        wordings=(
            f"Create the directory {folder} and copy {a} and {b} into it.",
            f"Copy {a} and {b} into a new directory named {folder}.",
            f"Make a folder {folder} and put copies of {a} and {b} in it.",
            f"The files {a} and {b} are needed in a new folder {folder} too. Keep the originals.",
            f"Place copies of both {a} and {b} in a directory called {folder}, which you create.",
        ),
        files={a: x, b: y},
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "first_copied": same(f"{folder}/{a}", x),
            "second_copied": same(f"{folder}/{b}", y),
            "originals_kept": both(same(a, x), same(b, y)),
        },
        solution=f"mkdir {folder}\ncp {a} {b} {folder}/",
    )


def copy_3(d: Draw) -> Recipe:
    src, dst, (p, q, r) = d.word(), d.word(), d.words(3)
    x, y = d.text(2), d.text(2)
    return Recipe(
        wordings=(
            f"Copy every .txt file of the folder {src} that is not empty to a new folder {dst}, and write their names, sorted, "
            f"to {dst}/names.list.",
            f"Create the folder {dst}. Copy all non-empty .txt files from {src} into it. Write the sorted names of the copied "
            f"files to {dst}/names.list.",
            f"Put copies of the .txt files of {src} into a new folder {dst}, leaving out empty ones. List the copied names in "
            f"sorted order in {dst}/names.list.",
            f"From {src}, take the .txt files with content (skip empty ones), copy them into the new folder {dst}, and record "
            f"their names, sorted, in {dst}/names.list.",
            f"Back up {src} to the new folder {dst}: only .txt files, no empty ones. The names of what you copied belong, "
            f"sorted, in {dst}/names.list.",
        ),
        files={f"{src}/{p}.txt": x, f"{src}/{q}.txt": y, f"{src}/{r}.txt": "", f"{src}/{r}.log": "skip\n"},
        checks={
            "folder_exists": f"[ -d {dst} ]",
            "texts_copied": both(same(f"{dst}/{p}.txt", x), same(f"{dst}/{q}.txt", y)),
            "others_left_out": f"[ -d {dst} ] && " + gone(f"{dst}/{r}.txt", f"{dst}/{r}.log"),
            "names_listed": same(f"{dst}/names.list", "\n".join(sorted((f"{p}.txt", f"{q}.txt")))),
            "source_kept": f'[ "$(ls {src} | wc -l)" = 4 ]',
        },
        solution=f"mkdir {dst}\nfind {src} -name '*.txt' -size +0 -exec cp {{}} {dst}/ \\;\n"
        f"(cd {dst}; ls *.txt | LC_ALL=C sort) > names.tmp\nmv names.tmp {dst}/names.list",
    )


def move_1(d: Draw) -> Recipe:
    a, b, content = d.file(), d.file(), d.text(3)
    return Recipe(
        wordings=(
            f"Rename the file {a} to {b}.",
            f"Move {a} to {b}.",
            f"Change the name of {a} to {b}.",
            f"Give the file {a} the new name {b}.",
            f"The file {a} should be called {b} instead.",
            f"Please rename {a} to {b}.",
            f"Rename {a} as {b}.",
            f"Move the file {a} to the new name {b}.",
            f"Change the file name {a} to {b}.",
            f"Let the file {a} be named {b} from now on.",
            f"Rename the file called {a}. Its new name is {b}.",
            f"Move {a} so that it is called {b}.",
            f"Change the name of the file {a}: it becomes {b}.",
            f"Rename file {a}, new name {b}.",
            f"The name {a} is wrong. Rename the file to {b}.",
        ),
        files={a: content},
        checks={"new_exists": exists(b), "new_is_same": same(b, content), "old_gone": gone(a)},
        solution=f"mv {a} {b}",
    )


def move_2(d: Draw) -> Recipe:
    a, b, folder, x, y = d.file(), d.file(), d.word(), d.text(2), d.text(3)
    return Recipe(
        wordings=(
            f"Create the directory {folder} and move {a} and {b} into it.",
            f"Move {a} and {b} into a new directory named {folder}.",
            f"Make a folder {folder}, then move both {a} and {b} there.",
            f"The files {a} and {b} belong in a new folder {folder}. Put them there.",
            f"Tidy up: {a} and {b} should lie in a directory called {folder}, not here.",
        ),
        files={a: x, b: y},
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "first_moved": same(f"{folder}/{a}", x),
            "second_moved": same(f"{folder}/{b}", y),
            "old_places_empty": gone(a, b),
        },
        solution=f"mkdir {folder}\nmv {a} {b} {folder}/",
    )


def move_3(d: Draw) -> Recipe:
    box, (p, q, r, s), x, y = d.word(), d.words(4), d.text(2), d.text(2)
    return Recipe(
        wordings=(
            f"Sort the files in {box}: move .log files to logs/, .csv files to tables/, and leave everything else. Write the "
            "number of moved files to moved.txt.",
            f"In the folder {box}, move all .log files to a new folder logs and all .csv files to a new folder tables. Write "
            "how many files you moved to moved.txt. Leave the rest.",
            f"Move every .log file of {box} into logs/ and every .csv file of {box} into tables/. Put the number of moved "
            "files "
            "into moved.txt. Other files stay.",
            f"Clean up {box}: logs (.log) go to logs/, tables (.csv) to tables/, the rest stays. Record the count of moved "
            "files in moved.txt.",
            f"Split {box} by type: .log to the new folder logs, .csv to the new folder tables, nothing else moves. State the "
            "number of files moved in moved.txt.",
        ),
        files={f"{box}/{p}.log": x, f"{box}/{q}.log": y, f"{box}/{r}.csv": "a,b\n", f"{box}/{s}.md": "# stay\n"},
        checks={
            "logs_moved": both(same(f"logs/{p}.log", x), same(f"logs/{q}.log", y)),
            "tables_moved": same(f"tables/{r}.csv", "a,b"),
            "old_places_empty": gone(f"{box}/{p}.log", f"{box}/{q}.log", f"{box}/{r}.csv"),
            "rest_stays": same(f"{box}/{s}.md", "# stay"),
            "number_right": same("moved.txt", "3"),
        },
        solution=f"mkdir logs tables\nmv {box}/*.log logs/\nmv {box}/*.csv tables/\nls logs tables | grep -c '\\.' > moved.txt",
    )


def delete_1(d: Draw) -> Recipe:
    a, b = d.file(), d.file()
    content = d.text(2)
    return Recipe(
        wordings=(
            f"Delete the file {a}.",
            f"Remove the file {a}.",
            f"Delete {a}.",
            f"Get rid of the file {a}.",
            f"The file {a} is no longer needed. Remove it.",
            f"Please delete {a}.",
            f"Remove {a} from this directory.",
            f"Delete the file called {a}.",
            f"Erase the file {a}.",
            f"Throw the file {a} away.",
            f"Remove the file named {a}.",
            f"Delete the file {a} and nothing else.",
            f"Use rm to delete {a}.",
            f"Clean up: delete {a}.",
            f"{a} should no longer exist. Delete it.",
        ),
        files={a: d.text(2), b: content},
        checks={"file_gone": gone(a), "only_other_left": f'[ "$(ls -A)" = {b} ]', "other_kept": same(b, content)},
        solution=f"rm {a}",
    )


def delete_2(d: Draw) -> Recipe:
    a, b, folder, content = d.file(), d.file(), d.word(), d.text(2)
    return Recipe(
        wordings=(
            f"Delete the directory {folder} and the file {a}. Keep {b}.",
            f"Remove the folder {folder} with everything in it, and the file {a}, but not {b}.",
            f"Remove {a} and the whole directory {folder}, and leave {b} alone.",
            f"Neither the folder {folder} nor the file {a} is needed any more: delete both. {b} stays.",
            f"Get rid of the directory {folder} and of {a}; {b} must survive.",
        ),
        files={a: d.text(2), b: content, f"{folder}/old.txt": "old\n", f"{folder}/more.txt": "more\n"},
        checks={"folder_gone": gone(folder), "file_gone": gone(a), "other_kept": same(b, content)},
        solution=f"rm -r {folder}\nrm {a}",
    )


def delete_3(d: Draw) -> Recipe:
    folder, sub, (p, q, r, s), keep = d.word(), d.word(), d.words(4), d.text(2)
    return Recipe(
        wordings=(
            f"In {folder} and its subdirectories delete all .tmp files and all empty files, then delete the subdirectories "
            "that "
            "are empty afterwards. Keep the rest.",
            f"Clean the folder {folder}: remove every .tmp file and every empty file at any depth, and then every empty folder "
            "inside. Nothing else may go.",
            f"Remove from {folder}, at any depth, files ending in .tmp, empty files, and then empty directories. Leave all "
            "other "
            "files.",
            f"Tidy {folder} recursively: .tmp files and empty files go, then folders left without content go too. Everything "
            "else stays.",
            f"Find and delete .tmp files as well as zero-size files anywhere under {folder}; drop subfolders that end up "
            "empty; "
            "keep all else.",
        ),
        files={
            f"{folder}/{p}.tmp": "x\n",
            f"{folder}/{q}.txt": keep,
            f"{folder}/{sub}/{r}.tmp": "y\n",
            f"{folder}/{sub}/{s}.txt": "",
            f"{folder}/full/{r}.txt": keep,
            f"{folder}/full/{s}.tmp": "z\n",
        },
        checks={
            "tmp_files_gone": f"[ -d {folder} ] && [ -z \"$(find {folder} -name '*.tmp')\" ]",
            "empty_files_gone": f'[ -d {folder} ] && [ -z "$(find {folder} -type f -empty)" ]',
            "empty_folders_gone": f"[ -d {folder} ] && " + gone(f"{folder}/{sub}"),
            "first_kept": same(f"{folder}/{q}.txt", keep),
            "second_kept": same(f"{folder}/full/{r}.txt", keep),
        },
        solution=f"find {folder} -name '*.tmp' -delete\nfind {folder} -type f -empty -delete\nfind {folder} -type d -empty -delete",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "create": (create_1, create_2, create_3),
    "copy": (copy_1, copy_2, copy_3),
    "move": (move_1, move_2, move_3),
    "delete": (delete_1, delete_2, delete_3),
}
