"""A request as it is stored and shown: the same, without the signatures of signed URLs.

A signature opens a file for a while; it is no part of what a run is, and a new one is given with each start. So the record of a run keeps
what identifies each source, and a resumed run is held against that and reads through the URL that it was given now.
"""

from mem_core.domain.request.runtime_request import RuntimeRequest
from mem_core.domain.secrets import in_texts, unsigned


def shown_request(request: RuntimeRequest) -> RuntimeRequest:
    """The request itself where no URL in it is signed, else the one to be stored and shown."""
    given = request.model_dump(mode="json")
    shown = in_texts(given, unsigned)
    return request if shown == given else RuntimeRequest.model_validate(shown)
