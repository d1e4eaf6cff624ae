"""Fetches a checkpoint from the model hub, pinned to the commit this package was checked against."""

from __future__ import annotations

from pathlib import Path

from mktts.errors import CheckpointError

# commit of each released checkpoint whose files the shape contract and the tests were written against
PINNED = {
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base": "5d83992436eae1d760afd27aff78a71d676296fc",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice": "85e237c12c027371202489a0ec509ded67b5e4b5",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base": "fd4b254389122332181a7c3db7f27e918eec64e3",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice": "0c0e3051f131929182e2c023b9537f8b1c68adfe",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign": "5ecdb67327fd37bb2e042aab12ff7391903235d3",
    "Qwen/Qwen3-0.6B": "c1899de289a04d12100db370d81485cdf75e47ca",
}
FILES = (
    "config.json",
    "configuration.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "speech_tokenizer/*.json",
    "speech_tokenizer/model*.safetensors",
)


def download(repo_id: str, revision: str | None = None) -> tuple[Path, str]:
    """Folder and revision of `repo_id`, from the local Hub cache or the Hub.

    Raises CheckpointError that says so where the Hub is offline or unreachable, or has no such checkpoint.
    """
    revision = revision or PINNED.get(repo_id, "main")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repo_id}: a Hub id needs huggingface_hub, which cannot be imported ({error}). "
            "Install it, or pass the folder of a downloaded checkpoint."
        ) from None
    by_folder = (
        f"download it where there is a network (hf download {repo_id} --revision {revision} --local-dir FOLDER) "
        "and pass that folder instead of the id"
    )
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{repo_id} at revision {revision}: expected a checkpoint on the Hub, found none "
            f"({type(error).__name__}). Check the id, or {by_folder}."
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        # no connection, HF_HUB_OFFLINE, a proxy in the way: all reach us as these
        raise CheckpointError(
            f"{repo_id} at revision {revision}: the Hub is offline or unreachable from here "
            f"({type(error).__name__}) and the local cache does not hold it; {by_folder}."
        ) from None
    except Exception as error:  # huggingface_hub lets its HTTP client's own exceptions through
        raise CheckpointError(
            f"{repo_id} at revision {revision}: the Hub is offline or answered with an error "
            f"({type(error).__name__}: {error}); {by_folder}."
        ) from None
    return Path(folder), revision
