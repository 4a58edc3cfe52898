"""What a sandbox sees of the host: the parts laid under it, what is masked in them, and the bare rest of the tree.

Every part is an overlay of its own, so what is not named here is not there at all: a new directory in the host's root
cannot leak, and the scheme also works where an unprivileged user may not overlay `/` as a whole. The price: a rename or a
hard link from one part to another fails with EXDEV, as between two file systems.
"""

import contextlib
import fnmatch
import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

FORMAT = 2
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/python3/dist-packages")
# Programs and their data. Of /var only package data: the rest of it is the host's own state.
TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt")
VAR = ("var/lib/dpkg", "var/lib/apt", "var/lib/gems", "var/lib/ghostscript", "var/lib/texmf")
# Hidden in /etc and /opt by name; what others may not read on the host is hidden there as well, whatever its name.
SECRET_NAMES = (
    *("shadow*", "gshadow*", "opasswd", "machine-id", "ssh_host_*", "*.key", "*.keytab", "*.p12", "*.pfx", "*.jks", "id_*"),
    *("pip.conf", ".pip", ".netrc", "netrc", ".npmrc", "npmrc", ".pypirc", ".git-credentials", "credentials*", "*secret*"),
    *("auth.conf", "auth.conf.d", "sources.list.d", "kubernetes", "rancher", "docker", "containerd", "letsencrypt"),
    *("wireguard", "openvpn", "crypttab", "fstab", "exports", "sudoers*", "krb5*", ".aws", ".ssh", ".docker", ".env", "*.kdbx"),
)
SECRET_PATHS = (
    "etc/ssl/private",
    "etc/ssh",
    "etc/environment",
    "etc/NetworkManager/system-connections",
    "etc/hosts",
    "etc/hostname",
)
OPT_DEPTH = 3  # /opt may hold whole toolchains: looked through this deep
DIRECTORIES = {  # made fresh in every sandbox
    **dict.fromkeys(("app", "home", "media", "mnt", "srv", "run", "run/lock", "sys", "proc", "dev", "boot", "logs"), 0o755),
    **dict.fromkeys(("var", "var/lib", "var/log", "var/mail", "var/spool", "var/local", "var/backups", "var/cache"), 0o755),
    **dict.fromkeys(("var/cache/apt", "var/cache/apt/archives", "var/cache/apt/archives/partial"), 0o755),
    **dict.fromkeys(("logs/agent", "logs/verifier", "logs/artifacts"), 0o777),
    **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
    "root": 0o700,
}
LINKS = {"var/run": "/run", "var/lock": "/run/lock"}


@dataclass(frozen=True, slots=True)
class Part:
    """One overlay. `name` is its directory in a layer; `target` its place ("" is the root); `lowers` top first."""

    name: str
    target: str
    lowers: tuple[str, ...]


def parts(base: Path) -> list[Part]:
    """The host's share of every sandbox: `base` (from `prepare`) over the host's directories. The root comes first."""
    found = [Part("root", "", (str(base / "root"),))]
    for target in (*TOP_LEVEL, *VAR):
        host = Path("/", target)
        if not host.is_dir() or (host.is_symlink() and "/" not in target):
            continue
        name = target.replace("/", "%")
        mask = base / name
        found.append(Part(name, target, (str(mask), str(host)) if mask.is_dir() else (str(host),)))
    return found


def changed() -> tuple[int, ...]:
    """When names last changed in the host's own directories of programs: an upgrade makes other files of them."""
    places = (*("/usr/bin", "/usr/sbin", "/usr/local/bin", "/etc", "/etc/alternatives", "/usr/lib"), *LIBRARIES)
    return tuple(Path(place).stat().st_mtime_ns for place in places if Path(place).is_dir())


def unpacked(base: Path, root: str) -> list[Part]:
    """The one part of a sandbox on an unpacked root file system: our own directories over it."""
    return [Part("root", "", (str(base / "bare"), root))]


def prepare(state_dir: Path) -> Path:
    """The bare tree and the masks, made once per state of the host's /etc and /opt; safe among several processes."""
    hidden = [path for top in ("etc", "opt") for path in secrets(Path("/", top))]
    hidden += [path for path in own(Path(__file__).resolve().parents[1]) if path not in hidden]
    tops = [(name, str(Path("/", name).readlink()) if Path("/", name).is_symlink() else "") for name in TOP_LEVEL]
    passwd = Path("/etc/passwd").read_text(errors="replace")
    text = repr((FORMAT, os.geteuid(), hidden, tops, passwd, DIRECTORIES, LINKS))
    base = state_dir / "base" / hashlib.sha256(text.encode()).hexdigest()[:24]
    if not base.is_dir():
        base.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"termrsi-base-{os.getpid()}-", dir=base.parent))
        _write_base(scratch, hidden, tops, passwd)
        try:
            scratch.rename(base)
        except OSError:  # another process was first; its copy is the same
            shutil.rmtree(scratch)
    return base


def own(package: Path) -> list[str]:
    """This package, or the checkout that it lies in, if a sandbox would see it: the solutions of the bundled tasks are in it."""
    place = package.parent if (package.parent / "pyproject.toml").is_file() else package
    return [str(place).lstrip("/")] if len(place.parts) > 2 and place.parts[1] in TOP_LEVEL else []


def secrets(top: Path) -> list[str]:
    """Paths under `top`, relative to the root, to be hidden; below a hidden directory nothing more is listed."""
    hidden: list[str] = []
    pending = [(top, 1)]
    while pending:
        directory, depth = pending.pop()
        with contextlib.suppress(PermissionError), os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                relative = entry.path.lstrip("/")
                if entry.is_symlink():
                    continue
                is_dir = entry.is_dir(follow_symlinks=False)
                closed = not entry.stat(follow_symlinks=False).st_mode & (stat.S_IXOTH if is_dir else stat.S_IROTH)
                named = any(fnmatch.fnmatch(entry.name, pattern) for pattern in SECRET_NAMES)
                if closed or relative in SECRET_PATHS or (named and not relative.startswith("etc/ssl/certs")):
                    hidden.append(relative)
                elif is_dir and (top.name == "etc" or depth < OPT_DEPTH):
                    pending.append((Path(entry.path), depth + 1))
    return sorted(hidden)


def _write_base(base: Path, hidden: list[str], tops: list[tuple[str, str]], passwd: str) -> None:
    base.chmod(0o755)
    bare = base / "bare"
    bare.mkdir()
    for name, mode in DIRECTORIES.items():
        if not name.startswith("var/"):  # those are the image's own
            (bare / name).mkdir(exist_ok=True, parents=True)
            (bare / name).chmod(mode)
    bare.chmod(0o755)
    root = base / "root"
    root.mkdir()
    for name, target in tops:
        if target:
            (root / name).symlink_to(target)
        elif Path("/", name).is_dir():
            (root / name).mkdir()
    for name in VAR:
        if Path("/", name).is_dir():
            (root / name).mkdir(parents=True)
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir(exist_ok=True)
        (root / name).chmod(mode)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    root.chmod(0o755)
    for path in hidden:
        top, _, rest = path.partition("/")
        target = base / top / rest
        _mkdir_like(base / top, Path("/", top), Path(rest).parent)
        os.mknod(target, stat.S_IFCHR | 0o000, os.makedev(0, 0))  # overlayfs: "not here"
    etc = base / "etc"
    _mkdir_like(etc, Path("/etc"), Path())
    users = [line.split(":")[0] for line in passwd.splitlines() if line]
    # Programs that add users want these files; the passwords are all locked.
    for name, text in (
        ("shadow", "".join(f"{user}:*:19000:0:99999:7:::\n" for user in users)),
        ("hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("hostname", "sandbox\n"),
    ):
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)
        (etc / name).chmod(0o640 if name == "shadow" else 0o644)


def _mkdir_like(mask: Path, host: Path, relative: Path) -> None:
    """`mask/relative` with the modes of the host's directories: a merged directory shows the upper one's."""
    for path in [*reversed(relative.parents), relative]:
        target = mask / path
        if not target.is_dir():
            target.mkdir(parents=True)
            target.chmod(stat.S_IMODE((host / path).stat().st_mode))
