"""Shards of the Hugging Face Hub in llm.c's format, of GPT-2's tokens:
val_000000.bin, train_000001.bin, ...

A file is downloaded into a hidden folder, checked (size, sha256, header) and renamed into place;
then shards.json is written.  A file that is there and matches is not downloaded again.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import Progress, print_line
from gpt2_triton.data.prepare.build import (
    ShardRecords,
    count_tokens,
    directory_in_use,
    disk_errors,
    require_space,
)
from gpt2_triton.data.prepare.hub import AGAIN, hub_errors, repository
from gpt2_triton.data.shards import RECORD, map_tokens
from gpt2_triton.errors import DataError
from gpt2_triton.files import fsync, object_in, sha256, write_json

REPOSITORIES = {
    "fineweb10B": "kjj0/fineweb10B-gpt2",
    "fineweb100B": "kjj0/fineweb100B-gpt2",
    "fineweb-edu-10B": "kjj0/finewebedu10B-gpt2",
    "fineweb-edu-100B": "karpathy/fineweb-edu-100B-gpt2-token-shards",
}
NAME = re.compile(r"(?:.*_)?(train|val)_([0-9]{6})\.bin")
OFFLINE = (
    "check the network and HF_ENDPOINT, or copy the files by hand and point data.train at them"
)


class Remote(NamedTuple):
    """A shard on the Hub."""

    name: str  # in the repository
    local: str
    size: int  # in bytes
    sha256: str


def download(name: str, out_dir: Path, shards: int | None = None) -> Path:
    """Download the validation shard and the first `shards` training shards (default all).

    `name` is one of REPOSITORIES or any owner/repository.
    """
    repo = REPOSITORIES.get(name, name)
    if "/" not in repo:
        raise DataError(
            f"prepare pretokenized: unknown data {name!r}; "
            f"choose {', '.join(REPOSITORIES)} or a repository's owner/name"
        )
    info = repository(repo, None, OFFLINE, files_metadata=True)
    with disk_errors(out_dir):
        rows = _download_missing(repo, info.sha, _choose(repo, info.siblings, shards), out_dir)
    print_line(f"prepared {out_dir}: {len(rows)} shards, {count_tokens(rows):,} tokens")
    return out_dir


def _choose(repo: str, siblings: Any, shards: int | None) -> list[Remote]:
    """Return the validation shards, then as many training shards as are asked for."""
    files = []
    for file in siblings:
        match = NAME.fullmatch(file.rfilename)
        if match and file.lfs:
            local = f"{match[1]}_{match[2]}.bin"
            files.append(Remote(file.rfilename, local, file.size, file.lfs.sha256))
    files.sort()
    train = [file for file in files if file.local.startswith("train")]
    val = [file for file in files if file.local.startswith("val")]
    if not train or not val:
        raise DataError(
            f"{repo}: no files *_train_NNNNNN.bin or no *_val_NNNNNN.bin; choose another repository"
        )
    if shards is not None and shards > len(train):
        raise DataError(f"--shards {shards}: {repo} has {len(train)}; ask for fewer")
    return val + train[:shards]


def _download_missing(repo: str, commit: str, files: list[Remote], out_dir: Path) -> ShardRecords:
    """Download what is not there; the record has each shard as soon as it is checked."""
    out_dir.mkdir(parents=True, exist_ok=True)
    recipe = {"tokenizer": "gpt2", "source": {"name": repo, "revision": commit}}
    shards: ShardRecords = {}
    source = object_in(out_dir / RECORD).get("source")
    ours = isinstance(source, dict) and source.get("name") == repo
    missing = []
    with Progress("checking shards", len(files), "shards") as progress:
        for file in files:
            if not _is_there(out_dir / file.local, file, ours):
                missing.append(file)
            progress.advance(1)
    size = sum(file.size for file in missing)
    require_space(out_dir, size)
    with Progress(f"downloading {repo}", size, "bytes") as progress:
        for file in files:
            if file in missing:
                _download_file(repo, commit, file, out_dir)
                progress.advance(file.size, file.local)
            shards[file.local] = {
                "tokens": len(map_tokens(out_dir / file.local)),
                "sha256": file.sha256,
            }
            write_json(out_dir / RECORD, recipe | {"shards": shards})
    shutil.rmtree(out_dir / ".download", ignore_errors=True)
    return shards


def _is_there(path: Path, file: Remote, ours: bool) -> bool:
    """Return whether the file is there; DataError for another, unless shards.json is `ours`."""
    if not path.exists():
        return False
    same = path.stat().st_size == file.size and sha256(path) == file.sha256
    if not same and not ours:
        raise directory_in_use(path)
    return same


def _download_file(repo: str, commit: str, file: Remote, out_dir: Path) -> None:
    """Download one shard beside the others, check it, and rename it into its place."""
    with hub_errors(f"{repo}/{file.name}", AGAIN):
        from huggingface_hub import hf_hub_download

        folder = out_dir / ".download"
        path = Path(
            hf_hub_download(repo, file.name, repo_type="dataset", revision=commit, local_dir=folder)
        )
    if sha256(path) != file.sha256:
        path.unlink()
        raise DataError(f"{repo}/{file.name}: damaged in the download; {AGAIN}")
    map_tokens(path)  # its header
    fsync(path)
    os.rename(path, out_dir / file.local)
