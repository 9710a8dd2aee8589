"""The Hugging Face hub: whether it answers, and its errors."""

import functools
import http.client
import os
import ssl
import urllib.error
import urllib.request

TIMEOUT = 5  # seconds for each of the hub's addresses, unless HF_HUB_ETAG_TIMEOUT is set


@functools.cache
def check_hub():
    """Call this before `huggingface_hub` or `datasets` is imported: both read HF_HUB_OFFLINE then.

    They retry for minutes on a hub that does not answer, so this asks once, and without an answer sets HF_HUB_OFFLINE:
    files that are already downloaded load, others are an error at once. Raises ValueError for a malformed HF_ENDPOINT.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or TIMEOUT)).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        pass  # it is an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # an answer too; the hub's library may know other certificates
        os.environ["HF_HUB_OFFLINE"] = "1"
        if os.environ.get("RANK", "0") == "0":
            print(
                f"{endpoint} does not answer ({reason}): only files that are already downloaded are used; "
                "HF_HUB_ETAG_TIMEOUT=60 waits longer, HF_HUB_OFFLINE=0 does not check"
            )


def hub_errors():
    """The exceptions of reading from the hub: its library's own, and those of the HTTP library it uses."""
    from huggingface_hub.errors import HTTPError

    return OSError, ValueError, HTTPError
