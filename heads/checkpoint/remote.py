"""Where heads are: in a folder, inside a model folder that `headway export --to hub` wrote, or on the hub.

Of a repository only the heads' own files are fetched (and, if asked for, their backbone), into huggingface_hub's cache.
Nothing that is fetched here is run, and nothing is a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download

from heads.checkpoint.schema import DESCRIPTION, TENSORS, read_description
from heads.decoding.tuned_file import TUNED_TREE
from heads.inside import find_inside

NESTED = "heads"
"""The folder of the heads inside a model folder."""
FILES = (DESCRIPTION, TENSORS, TUNED_TREE)
BACKBONE_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja")
HUB_ERRORS = (errors.HTTPError, errors.HFValidationError, errors.OfflineModeIsEnabled, OSError)
"""What huggingface_hub raises: HTTPError also if no server answers, OSError if it cannot ask and has nothing cached."""
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def find_heads(
    source: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    commit: str | None = None,
    with_backbone: bool = False,
) -> Path:
    """The folder that holds heads.json.

    Args:
        source: a folder of heads, a model folder with heads inside, or "organisation/name" on the hub.
        revision: branch, tag or commit on the hub.
        cache_dir: where files of the hub are kept; None is huggingface_hub's place.
        commit: the commit that the model was loaded from, taken where no revision is given; ignored for a folder.
        with_backbone: fetch a backbone that lies with the heads too.

    Raises:
        ValueError: revision or cache_dir for a folder, or no such repository, revision or heads in it.
    """
    if Path(source).is_dir() or not HUB_NAME.fullmatch(str(source)):
        if revision is not None or cache_dir is not None:
            raise ValueError(
                f"revision={revision!r} and cache_dir={str(cache_dir)!r} were given for the folder {source}; they "
                f"belong to names on the hub: leave them out, or give a name such as organisation/name."
            )
        return with_heads_inside(Path(source))
    fetch = [name for file in FILES for name in (file, f"{NESTED}/{file}")]
    revision = revision or commit
    folder = with_heads_inside(download(str(source), fetch, revision, cache_dir))
    if not (folder / DESCRIPTION).is_file():
        raise ValueError(f"{source} on the hub holds no {DESCRIPTION}; give a repository that `headway push` wrote.")
    if with_backbone:
        trained = read_description(folder).trained_backbone
        patterns = [f"{trained.folder}/*"] if trained is not None and folder.name != NESTED else []
        patterns += BACKBONE_FILES if folder.name == NESTED else ()
        if patterns:
            download(str(source), [*fetch, *patterns], revision, cache_dir)
    return folder


def with_heads_inside(folder: Path) -> Path:
    """The folder itself, or the folder `heads` in it where only that holds heads."""
    if (folder / DESCRIPTION).is_file() or not (folder / NESTED / DESCRIPTION).is_file():
        return folder
    return find_inside(folder, NESTED)


def backbone_around(folder: str | Path) -> Path | None:
    """The model folder around a folder of heads that `headway export --to hub` wrote; None for other folders."""
    folder = Path(folder)
    return folder.parent if folder.name == NESTED and (folder.parent / "config.json").is_file() else None


def download(
    name: str,
    patterns: Sequence[str],
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Some files of a repository, in huggingface_hub's cache.

    Raises:
        ValueError: no such repository or revision, no access, or no network and nothing in the cache.
    """
    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, allow_patterns=list(patterns), ignore_patterns=list(without)
        )
    except HUB_ERRORS as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        at = f" at revision {revision}" if revision else ""
        raise ValueError(
            f"{name} is no folder here, and could not be fetched from the hub{at} ({reason}); {advice_for(error)}, or "
            f"give a folder."
        ) from None
    return Path(found)


def advice_for(error: Exception) -> str:
    """What the user can do after the hub refused, or could not be asked."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return "log in with `hf auth login` as somebody who may, or correct the name"
    if status is not None:
        return "correct the name, or the revision" if status == 404 else "try again later"
    if constants.HF_HUB_OFFLINE:
        return "unset HF_HUB_OFFLINE, which keeps this process from asking the hub"
    return "connect to the network, or correct HF_ENDPOINT"
