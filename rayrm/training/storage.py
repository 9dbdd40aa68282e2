"""The run's folder, on a local path or behind any URL that pyarrow opens."""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from rayrm.errors import ConfigError, RayrmError


@contextmanager
def naming_a_full_disk(place: str) -> Iterator[None]:
    """Say where there is no room, whichever library meets it first.

    Raises:
        RayrmError: the disk or the quota is full.
    """
    try:
        yield
    except Exception as error:  # tokenizers and safetensors have it in their text alone
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and "No space left on device" not in str(error):
            raise
        raise RayrmError(
            f"{place}: cannot be written, the disk is full; make room and start again"
        ) from error


class RunFolder:
    """Reads and writes the files of a run; a file appears whole or not at all.

    Lines are appended to a local file. Behind a URL that is a spool, put in place by ``sync``.
    """

    def __init__(self, url: str) -> None:
        """Open the folder; nothing is created yet."""
        try:
            self._filesystem, self._root = _open(url)
        except (ValueError, OSError) as error:
            raise ConfigError(f"run.output_dir: cannot open {url} ({error})") from error
        self.is_local = isinstance(self._filesystem, pafs.LocalFileSystem)
        self.url = self._root if self.is_local else url
        """A plain path where the folder is local, be it given as ``file://``."""
        self._spool: str | None = None

    def create(self) -> None:
        """Make the folder, to know before a run that it can be written.

        Raises:
            ConfigError: it cannot.
        """
        try:
            self._filesystem.create_dir(self._root, recursive=True)
            if self.is_local and not os.access(self._root, os.W_OK):
                raise PermissionError(f"no permission to write in {self._root}")
        except OSError as error:
            raise ConfigError(f"run.output_dir: cannot make {self.url} ({error})") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out while the block runs; the kernel lets go when this one dies.

        Behind a URL there is no such lock.

        Raises:
            ConfigError: another process holds the folder.
        """
        if not self.is_local:
            yield
            return
        with open(self._inner(".lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"run.name: the run at {self.url} is being trained by another process; wait "
                    "for it, or give another run.name"
                ) from error
            except OSError:  # some network file systems have no locks
                pass
            yield

    def path(self, name: str) -> str:
        """Return a file's path or URL."""
        return f"{self.url.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Whether a file is there."""
        return self._filesystem.get_file_info(self._inner(name)).type != pafs.FileType.NotFound

    def entries(self, name: str) -> list[str]:
        """Return the names of what a folder holds; of a missing one nothing."""
        selector = pafs.FileSelector(self._inner(name), allow_not_found=True)
        return sorted(entry.base_name for entry in self._filesystem.get_file_info(selector))

    def delete(self, name: str) -> None:
        """Delete a file or a folder with all that is in it, if it is there."""
        self._delete(self._inner(name))

    def open_file(self, name: str) -> pa.NativeFile:
        """Open a file for reading at any place."""
        return self._filesystem.open_input_file(self._inner(name))

    def read_json(self, name: str) -> Any:
        """Return a JSON file's value, or None where the file is missing."""
        if not self.exists(name):
            return None
        with self._filesystem.open_input_stream(self._inner(name)) as stream:
            return json.loads(stream.read())

    def write_text(self, name: str, text: str) -> None:
        """Write a file aside, then put it in place."""
        content = text.encode("utf-8")
        self._make_parent(name)
        aside = self._inner(name) + ".part"
        with naming_a_full_disk(self.path(name)):
            with self._filesystem.open_output_stream(aside) as stream:
                stream.write(content)
            self._filesystem.move(aside, self._inner(name))

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as indented JSON."""
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_json_lines(self, name: str, values: Iterable[Any]) -> None:
        """Write each value as a line of JSON."""
        lines = (json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        self.write_text(name, "".join(lines))

    def append_json(self, name: str, value: Any) -> None:
        """Append a value as one line; on a local disk it is there when this returns."""
        local = self.local_path(name)
        with naming_a_full_disk(local), open(local, "a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def cut_lines(self, name: str, *, after_step: int) -> None:
        """Drop lines whose ``step`` is later than a checkpoint's: they will be written again."""
        lines = self.read_lines(name)
        kept = [line for line in lines if json.loads(line).get("step", 0) <= after_step]
        local = self.local_path(name)
        if kept or os.path.exists(local):
            part = f"{local}.part"
            with naming_a_full_disk(local), open(part, "w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in kept)
            os.replace(part, local)

    def read_lines(self, name: str) -> list[str]:
        """Return a JSON lines file's whole lines; one cut short by a kill is left out."""
        if not self.exists(name):
            return []
        with self._filesystem.open_input_stream(self._inner(name)) as stream:
            lines = stream.read().decode("utf-8", "replace").split("\n")
        return [line for line in lines if line.startswith("{") and line.endswith("}")]

    def sync(self) -> None:
        """Put what was written to ``local_path`` in place behind a URL."""
        if self._spool:
            self._filesystem.create_dir(self._root, recursive=True)
            pafs.copy_files(self._spool, self._root, destination_filesystem=self._filesystem)

    @contextmanager
    def building(self, name: str) -> Iterator[str]:
        """Yield a local folder to fill; it takes the place of ``name`` once the block succeeds.

        Object stores cannot move folders: behind a URL the files are copied into place.
        """
        target = self._inner(name)
        if not self.is_local:
            with tempfile.TemporaryDirectory(prefix="rayrm-build-") as built:
                yield built
                self._delete(target)
                self._filesystem.create_dir(target, recursive=True)
                pafs.copy_files(built, target, destination_filesystem=self._filesystem)
            return
        aside, old = f"{target}.part", f"{target}.old"
        self._delete(aside)
        os.makedirs(aside)
        try:
            with naming_a_full_disk(target):
                yield aside
        except BaseException:
            self._delete(aside)
            raise
        self._delete(old)
        if self.exists(name):
            self._filesystem.move(target, old)
        self._filesystem.move(aside, target)
        self._delete(old)

    def _delete(self, inner: str) -> None:
        match self._filesystem.get_file_info(inner).type:
            case pafs.FileType.Directory:
                self._filesystem.delete_dir(inner)
            case pafs.FileType.File:
                self._filesystem.delete_file(inner)

    def _inner(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def local_path(self, name: str) -> str:
        """Return where a file is written on this machine, with its folder made."""
        if self.is_local:
            local = self._inner(name)
        else:
            self._spool = self._spool or tempfile.mkdtemp(prefix="rayrm-spool-")
            local = os.path.join(self._spool, name)
        os.makedirs(os.path.dirname(local), exist_ok=True)
        return local

    def _make_parent(self, name: str) -> None:
        self._filesystem.create_dir(os.path.dirname(self._inner(name)), recursive=True)


def _open(url: str) -> tuple[pafs.FileSystem, str]:
    if "://" in url:
        return pafs.FileSystem.from_uri(url)
    return pafs.LocalFileSystem(), os.path.abspath(url)
