"""Families on files and directories: create, copy, move, delete, directories, symlinks, permissions."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, gone, prints, same


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


def directories_1(d: Draw) -> Recipe:
    folder, other, kept = d.word(), d.file(), d.text(2)
    return Recipe(
        wordings=(
            f"Create a directory named {folder}.",
            f"Make a new directory called {folder}.",
            f"Create the folder {folder}.",
            f"Add a directory with the name {folder}.",
            f"We need a folder, {folder}. Make it.",
            f"Please create a directory {folder}.",
            f"Create {folder} as a directory.",
            f"Use mkdir to create {folder}.",
            f"A directory with the name {folder} is missing here. Create it.",
            f"Start a new folder and call it {folder}.",
            f"Make a folder called {folder}.",
            f"Make the directory {folder}.",
            f"Create an empty directory named {folder}.",
            f"Make sure there is a directory called {folder}.",
            f"There should be a folder named {folder} here.",
        ),
        files={other: kept},
        checks={"path_exists": f"[ -e {folder} ]", "is_directory": f"[ -d {folder} ]", "other_kept": same(other, kept)},
        solution=f"mkdir {folder}",
    )


def directories_2(d: Draw) -> Recipe:
    a, b, c = d.words(3)
    name = d.file()
    return Recipe(
        wordings=(
            f"Create the directory {a}/{b}/{c} and an empty file {name} in it.",
            f"Make the nested directories {a}/{b}/{c}, then create the empty file {a}/{b}/{c}/{name}.",
            f"Create {a}/{b}/{c} and put an empty file named {name} inside.",
            f"A folder {a} with {b} inside, with {c} inside that, is needed; the innermost holds an empty file {name}.",
            f"Build the path {a}/{b}/{c} and leave an empty {name} at its end.",
        ),
        files={"readme.txt": "work folder\n"},
        checks={
            "outer_exists": f"[ -d {a} ]",
            "path_exists": f"[ -d {a}/{b}/{c} ]",
            "file_exists": exists(f"{a}/{b}/{c}/{name}"),
            "readme_kept": same("readme.txt", "work folder"),
        },
        solution=f"mkdir -p {a}/{b}/{c}\ntouch {a}/{b}/{c}/{name}",
    )


def directories_3(d: Draw) -> Recipe:
    old, new, bare, (p, q) = d.word(), d.word(), d.word(), d.words(2)
    x = d.text(2)
    return Recipe(
        wordings=(
            f"Rename the directory {old} to {new}, delete the empty directory {bare}, create {new}/{p} and {new}/{q}, and move "
            f"{new}/start.txt into {new}/{p}.",
            f"Change the directory {old} into {new}. Inside it make the folders {p} and {q} and move start.txt into {p}. "
            "Remove "
            f"the empty directory {bare}.",
            f"Remove the empty folder {bare}. Rename {old} to {new}, add the subfolders {p} and {q} to {new}, and move its "
            "file "
            f"start.txt into {p}.",
            f"{old} should be called {new}, with two subdirectories {p} and {q}; its start.txt belongs into {p}. The empty "
            f"{bare} should go.",
            f"Reorganise: {bare} (empty) goes away, {old} becomes {new}, {new} gets the directories {p} and {q}, and start.txt "
            f"moves from {new} to {new}/{p}.",
        ),
        files={f"{old}/start.txt": x, f"{old}/end.txt": "end\n"},
        setup=(f"mkdir {bare}",),
        checks={
            "renamed": f"[ -d {new} ] && [ ! -e {old} ]",
            "empty_one_gone": gone(bare),
            "subfolders_exist": f"[ -d {new}/{p} ] && [ -d {new}/{q} ]",
            "file_moved": both(same(f"{new}/{p}/start.txt", x), gone(f"{new}/start.txt")),
            "other_file_kept": same(f"{new}/end.txt", "end"),
        },
        solution=f"mv {old} {new}\nrmdir {bare}\nmkdir {new}/{p} {new}/{q}\nmv {new}/start.txt {new}/{p}/",
    )


def symlinks_1(d: Draw) -> Recipe:
    a, b, content = d.file(), d.file(), d.text(2)
    return Recipe(
        wordings=(
            f"Create a symbolic link named {b} that points to {a}.",
            f"Make a symbolic link {b} to the file {a}.",
            f"Create a symlink from {b} to {a}.",
            f"Add a soft link called {b} for the file {a}.",
            f"The name {b} should be a symbolic link to {a}.",
            f"Please create a symbolic link {b} to {a}.",
            f"Link {b} to {a} with a symbolic link.",
            f"Use ln -s to make {b} a link to {a}.",
            f"Create a soft link {b} that leads to {a}.",
            f"Let {b} be a symlink for the file {a}.",
            f"Create the symbolic link {b} for {a}.",
            f"Make {b} a symbolic link that points to {a}.",
            f"Create a symlink named {b} to the file {a}.",
            f"Make a symlink called {b}. Its target is {a}.",
            f"Set up {b} as a symbolic link to {a}.",
        ),
        files={a: content},
        checks={
            "link_exists": f"[ -L {b} ]",
            "link_points_there": f'[ "$(readlink -f {b})" = "$(readlink -f {a})" ] && [ -L {b} ]',
            "link_readable": same(b, content),
            "file_kept": f"[ ! -L {a} ] && " + same(a, content),
        },
        solution=f"ln -s {a} {b}",
    )


def symlinks_2(d: Draw) -> Recipe:
    a, b, folder, x, y = d.file(), d.file(), d.word(), d.text(2), d.text(2)
    return Recipe(
        wordings=(
            f"Create the directory {folder} with two working symbolic links in it: {a} to the file {a} here, and {b} to "
            "the file "
            f"{b} here.",
            f"Make a folder {folder} and in it symbolic links {a} and {b} to the files of the same names in /app.",
            f"In a new directory {folder}, link {a} and {b} symbolically to /app/{a} and /app/{b}.",
            f"The new folder {folder} should hold soft links to {a} and {b}, under the same names.",
            f"Set up a directory {folder} whose entries {a} and {b} are symlinks to the real files one level up.",
        ),
        files={a: x, b: y},
        checks={
            "folder_exists": f"[ -d {folder} ]",
            "are_links": f"[ -L {folder}/{a} ] && [ -L {folder}/{b} ]",
            "first_works": f"[ -L {folder}/{a} ] && " + same(f"{folder}/{a}", x),
            "second_works": f"[ -L {folder}/{b} ] && " + same(f"{folder}/{b}", y),
            "files_kept": both(same(a, x), same(b, y)),
        },
        solution=f"mkdir {folder}\nln -s ../{a} {folder}/{a}\nln -s ../{b} {folder}/{b}",
    )


def symlinks_3(d: Draw) -> Recipe:
    base, low = d.word(), d.number(1, 4)
    old, mid, top = f"{base}-{low}", f"{base}-{low + 1}", f"{base}-{low + 2 + d.number(0, 3)}"
    return Recipe(
        wordings=(
            f"The link current points to a missing folder. Make it point to the {base} folder in releases with the highest "
            "number, "
            "and create the link previous to the second highest.",
            f"Repair the broken symbolic link current: it should point to the newest {base} release in releases (highest "
            "number). "
            "Add a link previous to the second newest.",
            f"Look into releases. Point the symlink current at the {base} folder with the highest number and a new symlink "
            "previous at the one with the second highest number.",
            f"current is a dangling link. Find the latest {base} in releases by number and link current to it; link "
            "previous to "
            "the one before it.",
            f"Set the symlinks current and previous to the highest and the second highest numbered {base} folder of releases; "
            "current is broken now.",
        ),
        files={f"releases/{v}/version.txt": f"{v}\n" for v in (old, mid, top)},
        setup=(f"ln -s releases/{base}-0 current",),
        checks={
            "current_is_link": "[ -L current ] && [ -d current ]",
            "current_is_newest": same("current/version.txt", top),
            "previous_is_link": "[ -L previous ]",
            "previous_is_second": same("previous/version.txt", mid),
            "releases_kept": f"[ -f releases/{old}/version.txt ] && [ ! -L releases/{top} ]",
        },
        solution=f"rm current\nln -s releases/{top} current\nln -s releases/{mid} previous\nreadlink current previous",
    )


def permissions_1(d: Draw) -> Recipe:
    s, w = d.file("sh"), d.word()
    body = f"#!/bin/bash\necho {w}\n"
    return Recipe(
        wordings=(
            f"Make the file {s} executable.",
            f"Make {s} executable.",
            f"Give the script {s} execute permission.",
            f"The script {s} cannot be executed. Set its execute permission.",
            f"Add the executable bit to {s}.",
            f"Please make {s} executable.",
            f"Set the executable bit of {s}.",
            f"Use chmod to make {s} executable.",
            f"Make it possible to execute {s}.",
            f"The file {s} should be executable.",
            f"Make the script {s} executable.",
            f"Add execute permission to {s}.",
            f"Change the mode of {s} so that it can be executed.",
            f"Allow everybody to execute {s}.",
            f"Turn {s} into an executable script with chmod.",
        ),
        files={s: body},
        setup=(f"chmod 644 {s}",),
        checks={"is_executable": f"[ -x {s} ]", "runs": prints(f"./{s}", w), "text_kept": same(s, body)},
        solution=f"chmod +x {s}",
    )


def permissions_2(d: Draw) -> Recipe:
    a, b, x = d.file(), d.file("sh"), d.text(2)
    return Recipe(
        wordings=(
            f"Set the permissions of {a} to 600 and of {b} to 755.",
            f"Change the mode of {a} to 600 and the mode of {b} to 755.",
            f"Give {a} the permissions 600 and {b} the permissions 755.",
            f"Nobody but the owner may read or write {a} (600); everybody may run {b} (755). Set the modes.",
            f"File modes needed: 600 for {a}, 755 for {b}.",
        ),
        files={a: x, b: "#!/bin/bash\necho ready\n"},
        setup=(f"chmod 644 {a} {b}",),
        checks={
            "first_mode": f'[ "$(stat -c %a {a})" = 600 ]',
            "second_mode": f'[ "$(stat -c %a {b})" = 755 ]',
            "second_runs": prints(f"./{b}", "ready"),
            "first_kept": same(a, x),
        },
        solution=f"chmod 600 {a}\nchmod 755 {b}",
    )


def permissions_3(d: Draw) -> Recipe:
    folder, (p, q, r, s) = d.word(), d.words(4)
    return Recipe(
        wordings=(
            f"In the folder {folder} (with subfolders) set all .sh files to 755, all .key files to 600 and leave the "
            "others. Write "
            "the number of .key files to keys.txt.",
            f"Fix the permissions under {folder}, at any depth: 755 for .sh files, 600 for .key files, no change for "
            "others. Write "
            "how many .key files there are to keys.txt.",
            f"Under {folder}, every .sh file needs mode 755 and every .key file mode 600; others stay as they are. Put the "
            "number "
            "of .key files into keys.txt.",
            f"Secure {folder} recursively: .key files become 600, .sh files 755, the rest keeps its mode. keys.txt gets "
            "the count "
            "of .key files.",
            f"Recursively, give {folder}'s scripts (.sh) the mode 755 and its keys (.key) 600, touching nothing else, and "
            "record "
            "the number of keys in keys.txt.",
        ),
        files={
            f"{folder}/{p}.sh": "#!/bin/bash\necho one\n",
            f"{folder}/in/{q}.sh": "#!/bin/bash\necho two\n",
            f"{folder}/{r}.key": "k1\n",
            f"{folder}/in/{s}.key": "k2\n",
            f"{folder}/in/{s}.txt": "plain\n",
        },
        setup=(f"find {folder} -type f -exec chmod 644 {{}} +",),
        checks={
            "scripts_set": both(*(f'[ "$(stat -c %a {f})" = 755 ]' for f in (f"{folder}/{p}.sh", f"{folder}/in/{q}.sh"))),
            "keys_set": both(*(f'[ "$(stat -c %a {f})" = 600 ]' for f in (f"{folder}/{r}.key", f"{folder}/in/{s}.key"))),
            "others_kept": f'[ "$(stat -c %a {folder}/in/{s}.txt)" = 644 ]',
            "number_right": same("keys.txt", "2"),
        },
        solution=f"find {folder} -name '*.sh' -exec chmod 755 {{}} +\nfind {folder} -name '*.key' -exec chmod 600 {{}} +\n"
        f"find {folder} -name '*.key' | wc -l > keys.txt",
    )


RECIPES: dict[str, tuple[Maker, Maker, Maker]] = {
    "create": (create_1, create_2, create_3),
    "copy": (copy_1, copy_2, copy_3),
    "move": (move_1, move_2, move_3),
    "delete": (delete_1, delete_2, delete_3),
    "directories": (directories_1, directories_2, directories_3),
    "symlinks": (symlinks_1, symlinks_2, symlinks_3),
    "permissions": (permissions_1, permissions_2, permissions_3),
}
