"""Files on their way to and from a sandbox on another node: tars of one member."""

import io
import tarfile
from pathlib import Path


def pack(path: Path) -> bytes:
    """A tar that holds one member, the file or the tree at `path`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(path, arcname="content")
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> Path:
    """Where the packed file or tree lies now."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        # Python 3.11.4 brought filters; before, what they hold back is not in an archive that `pack` made.
        if hasattr(tarfile, "tar_filter"):
            tar.extractall(folder, filter="tar")
        else:
            tar.extractall(folder)
    return folder / "content"
