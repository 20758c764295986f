"""httpx without certificates: to read them takes 20 ms a call, and nothing here is encrypted."""

from __future__ import annotations

from functools import partial

import httpx

Client = partial(httpx.Client, verify=False)
request = partial(httpx.request, verify=False)
get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
stream = partial(httpx.stream, verify=False)
