"""Upload heads, or a model folder that was exported with them, to a repository on the hub, with a model card.

One commit has all files: those that `heads.save` writes, or every file of an exported folder. A card in the folder is
uploaded with the repository's name put in; otherwise one is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi

from heads.checkpoint.opening import find_backbone, find_trained
from heads.checkpoint.remote import FILES, HUB_ERRORS, HUB_NAME, advice_for, with_heads_inside
from heads.checkpoint.save_load import save
from heads.checkpoint.schema import read_description
from heads.export.hub.card import CARD, named_card, write_card
from heads.inside import find_inside, links_out
from heads.interface.token_heads import TokenHeads


def push_to_hub(
    heads: TokenHeads | str | Path,
    name: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    message: str = "Upload heads",
    measured: Sequence[str | Path] = (),
    license: str | None = None,
) -> str:
    """Upload heads to the hub; `heads.load(name, model)` loads them from there.

        heads.push_to_hub(token_heads, "my-organisation/my-heads", license="apache-2.0")

    Args:
        heads: token heads, a folder of heads, or a model folder of `headway export --to hub`.
        name: "organisation/name"; the repository is made if there is none.
        revision: branch, which is made if there is none; None is the main one.
        private: whether a repository that is made is private; None is the organisation's default.
        message: the commit's message.
        measured: files of `headway benchmark --json` or `headway evaluate`, whose figures the model card shows.
        license: identifier on the hub, for the model card.

    Returns:
        The commit's address.

    Raises:
        ValueError: another kind of name, no heads in the folder, links out of it, a card of its own beside what a new
            one would show, or the hub refuses: not logged in, no right to write, or not reached.
    """
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"{name!r} was given as the repository; give its name on the hub, organisation/name.")
    with TemporaryDirectory(prefix="headway-push-") as written:
        if isinstance(heads, TokenHeads):
            save(heads, heads_folder := Path(written) / "heads")
        folder = heads_folder if isinstance(heads, TokenHeads) else Path(heads)
        card = Path(written) / CARD
        describe_folder(folder, card, name, measured, license)
        files = {path.relative_to(folder).as_posix(): path for path in files_of(folder)} | {CARD: card}
        return commit(files, name, revision=revision, private=private, message=message)


def describe_folder(folder: Path, card: Path, name: str, measured: Sequence[str | Path], license: str | None) -> None:
    """Write the card that is uploaded: the folder's own, or a new one.

    Raises:
        ValueError: no heads, or a card of its own beside what only a new one would show.
    """
    inside = with_heads_inside(folder)
    read_description(inside)
    text = named_card(folder, name)
    if text is None:
        write_card(
            card.parent,
            heads=inside,
            name=name,
            served=inside != folder,
            base=Path(find_backbone(inside)),
            measured=measured,
            license=license,
        )
    elif measured or license:
        raise ValueError(
            f"Measurements or a licence were given for the model card, and {folder / CARD} is uploaded as it is; leave "
            f"them out, or remove that file and a new card is written."
        )
    else:
        card.write_text(text, encoding="utf-8")


def files_of(folder: Path) -> Iterator[Path]:
    """What is uploaded of a folder, its card aside.

    Raises:
        ValueError: a link that leads out of it.
    """
    inside = with_heads_inside(folder)
    if inside != folder:
        if links := links_out(folder):
            raise ValueError(
                f"{links[0]} is a link that leads out of {folder}; put a copy in its place and push again."
            )
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CARD)
        return
    yield from (find_inside(folder, name) for name in FILES if (folder / name).is_file())
    trained = read_description(folder).trained_backbone
    if trained is not None:
        yield from (path for path in sorted(find_trained(folder, trained.folder).rglob("*")) if path.is_file())


def commit(files: dict[str, Path], name: str, *, revision: str | None, private: bool | None, message: str) -> str:
    """Make the repository and the branch where they are missing, and commit the files; returns the commit's address.

    Raises:
        ValueError: the hub refuses, or is not reached.
    """
    hub = HfApi()
    operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in files.items()]
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            hub.create_branch(name, branch=revision, exist_ok=True)
        done = hub.create_commit(name, operations, commit_message=message, revision=revision)
    except (*HUB_ERRORS, RuntimeError) as error:  # RuntimeError: a large file failed, for the reason in its cause
        refusal = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = " ".join(f"{error}{'' if refusal is error else f' {refusal}'}".split())[:300].rstrip(".")
        raise ValueError(
            f"{name} could not be written at {hub.endpoint} ({reason}); {advice_for(refusal)}, and push again."
        ) from None
    return str(done.commit_url)
