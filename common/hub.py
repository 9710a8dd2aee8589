"""The Hugging Face hub: whether it answers, and its files."""

import contextlib
import functools
import http.client
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from common.errors import UserError, first_line
from common.files import regular_file

TIMEOUT = 5  # seconds for each of the hub's addresses, unless HF_HUB_ETAG_TIMEOUT is set


@functools.cache
def check_hub():
    """Call this before `huggingface_hub` or `datasets` is imported: both read HF_HUB_OFFLINE then.

    They retry for minutes on a hub that does not answer, so this asks once, and without an answer sets HF_HUB_OFFLINE:
    files that are already downloaded load, others are an error at once. Raises UserError for a malformed HF_ENDPOINT.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or TIMEOUT)).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        pass  # it is an answer
    except ValueError as error:
        raise UserError(f"HF_ENDPOINT or HF_HUB_ETAG_TIMEOUT is malformed: {error}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # an answer too; the hub's library may know other certificates
        os.environ["HF_HUB_OFFLINE"] = "1"
        if os.environ.get("RANK", "0") == "0":
            print(
                f"{endpoint} does not answer ({reason}): only files that are already downloaded are used; "
                "HF_HUB_ETAG_TIMEOUT=60 waits longer, HF_HUB_OFFLINE=0 skips this check"
            )


@contextlib.contextmanager
def answered():
    """Turn an error of the hub's libraries into an OSError with the hub's own answer, such as 500.

    The libraries wrap it in errors that read as if a file did not exist.
    """
    from huggingface_hub.errors import EntryNotFoundError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        chain = [error]
        while inner := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(inner)
        answer = next((each for each in chain if isinstance(each, HTTPError)), error)
        offline = any("OfflineModeIsEnabled" in repr(each) for each in chain)
        text = "offline: HF_HUB_OFFLINE is set, or the hub does not answer" if offline else first_line(answer)
        missing = isinstance(answer, EntryNotFoundError) and not isinstance(answer, LocalEntryNotFoundError)  # offline
        raise (FileNotFoundError if missing else OSError)(text) from error


def find_file(name, file):
    """The path of a file in a Hugging Face folder, or in a repository on the hub, which is downloaded once."""
    folder = Path(name)
    if folder.is_dir():
        return regular_file(folder / file)
    of_hub = len(folder.parts) == 1 or (len(folder.parts) == 2 and not folder.parent.exists())  # NAME or OWNER/NAME
    if not of_hub or folder.exists() or folder.is_symlink() or str(name)[0] in "./~":
        raise FileNotFoundError(f"{name} is not a folder with config.json and model.safetensors")
    return download(str(name), file)


def download(repository, file, kind="model"):
    """The path of a file of a repository on the hub, a "model" or a "dataset", downloaded once. Raises OSError."""
    check_hub()
    from huggingface_hub import hf_hub_download

    with answered():
        return Path(hf_hub_download(repository, file, repo_type=kind))
