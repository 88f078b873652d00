"""
Web pages that show queues, messages, dead letters and workers, alone or mounted in an ASGI application.

Install them with reliq's extra `web`.
"""

from reliq import distribution

try:
    import jinja2 as _jinja2
    import starlette as _starlette
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(distribution.missing("reliq.web", "starlette and jinja2", "web")) from missing

from reliq.web.access import Access, Visitor
from reliq.web.application import Application

app = Application
__all__ = ["Access", "Visitor", "app"]

del _jinja2, _starlette
