"""Families on what holds files and who may use them: directories, symlinks, permissions."""

from termrsi.tasks.bundled.recipe import Draw, Maker, Recipe, both, exists, gone, prints, same


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
    "directories": (directories_1, directories_2, directories_3),
    "symlinks": (symlinks_1, symlinks_2, symlinks_3),
    "permissions": (permissions_1, permissions_2, permissions_3),
}
