"""A drafter's folder made complete, and its way to the Hugging Face Hub."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers.utils import CONFIG_NAME

from ..drafters.base import CODE
from . import cards, provenance

if TYPE_CHECKING:
    from ..drafters.base import Drafter

PUSH_KEYS = ("repo_id", "revision", "private", "token", "commit_message", "commit_description", "create_pr", "tags")
# What belongs to a drafter; a trainer's folder also holds its optimizer, logs and earlier checkpoints.
_PUBLISHED = (".safetensors", ".safetensors.index.json", ".md", ".py", ".png", ".jinja")
_JSON = {CONFIG_NAME, "generation_config.json", provenance.FILE, cards.BENCH}

# What the HTTP client raises without an answer; which client it is differs between versions of huggingface_hub.
_CLIENT_ERROR = HfHubHTTPError.__bases__[0]


def complete(folder: str | Path, drafter: Drafter) -> None:
    """Put beside a drafter's saved weights what others need: code for `trust_remote_code`, known facts, and a card."""
    folder = Path(folder)
    _write_code(folder, type(drafter))
    if drafter.name_or_path:
        _carry_facts(Path(drafter.name_or_path), folder)
    if cards.is_ours(folder):
        cards.write(folder)


def _write_code(folder: Path, family: type[Drafter]) -> None:
    """The module that the config's `auto_map` names."""
    model, config = family.__name__, family.config_class.__name__
    package = family.__module__.partition(".")[0]
    imports = sorted({package, "hf_specdraft"})
    lines = [
        '"""Lets AutoModel load this drafter with trust_remote_code=True; importing hf_specdraft does the same."""',
        "",
        *(f"import {name}" for name in imports),
        "",
        f'{model} = hf_specdraft.families()["{family.config_class.model_type}"]',
        f"{config} = {model}.config_class",
    ]
    (folder / f"{CODE}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _carry_facts(source: Path, folder: Path) -> None:
    """Copy training and measurements of the folder a drafter was loaded from, if these are still the same weights."""
    if not source.is_dir() or source.resolve() == folder.resolve():
        return
    weights = [file.name for file in source.glob("*.safetensors")]
    # Byte by byte, because a fine-tuned drafter has the sizes of the one it came from.
    if weights and not any(filecmp.cmpfiles(source, folder, weights, shallow=False)[1:]):
        for name in (provenance.FILE, cards.BENCH):
            if (source / name).exists() and not (folder / name).exists():
                shutil.copyfile(source / name, folder / name)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> str:
    """Upload a drafter's folder: weights, config, card and known facts, nothing else. Returns the commit's URL.

    The repository, and the branch `revision`, are made when they do not exist. A card that this package wrote is
    written anew, with the repository's name and `tags`.
    Raises ValueError when the folder holds no drafter, there is no token, or the Hub refuses; OSError when offline.
    """
    folder = Path(folder)
    own = cards.is_own_format(folder)
    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it and try again")
    token = token if isinstance(token, str) else huggingface_hub.get_token()
    if not token:
        raise ValueError("no Hugging Face token: set HF_TOKEN or run `hf auth login`, with a token that may write")
    if own and cards.is_ours(folder):
        cards.write(folder, repo_id=repo_id, tags=tags)
    files = [f.name for f in folder.iterdir() if f.name in _JSON or f.name.endswith(_PUBLISHED)]
    api = HfApi(token=token, library_name="hf_specdraft")
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=files,
            revision=revision,
            commit_message=commit_message or "Upload drafter",
            commit_description=commit_description,
            create_pr=create_pr,
        ).commit_url
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no repository name: {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = (
            "; the token in HF_TOKEN or from `hf auth login` may not write there" if status in (401, 403, 404) else ""
        )
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"the Hub refused to take {repo_id} (status {status}: {reason}){remedy}") from error
    except _CLIENT_ERROR as error:
        raise OSError(f"{constants.ENDPOINT} cannot be reached ({error}); try again later") from error
