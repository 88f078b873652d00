"""The pages mounted under a prefix in a FastAPI application: all links keep the prefix."""

from fastapi import FastAPI
from site_page import LINK, TOKEN, crawl, serving

from reliq.web import Access, app

PREFIX = "/ops/reliq"


def in_fastapi(page):
    api = FastAPI()
    api.mount(PREFIX, page)
    return api


def test_every_link_stays_under_the_prefix(url, orders):
    page = app(url, token=TOKEN, grants=Access.WRITE)
    with serving(page, mounted=in_fastapi(page), prefix=PREFIX) as site:
        browser = site.browser()
        seen = crawl(browser, [f"{PREFIX}/"], LINK, prefix=PREFIX)
        posted = browser.post("/queues/orders/pause")

    assert len(seen) > 12
    assert [path for path in seen if not path.startswith(f"{PREFIX}/")] == []
    odd = {path: status for path, status in seen.items() if status != 200}
    assert odd == {f"{PREFIX}/queues/orders/message": 404}  # the search for an id, without an id
    assert posted.headers["location"] == f"{PREFIX}/queues/orders?done=pause"


def test_cookie_is_limited_to_the_prefix(url):
    page = app(url, token=TOKEN)
    with serving(page, mounted=in_fastapi(page), prefix=PREFIX) as site:
        client = site.client(Sec_Fetch_Site="same-origin")
        answer, ended = client.post(f"/enter/{site.app.token.once()}"), client.post("/logout")

    assert answer.headers["location"] == f"{PREFIX}/"
    assert [f"path={PREFIX};" in one.headers["set-cookie"].lower() for one in (answer, ended)] == [True, True]


def test_resolver_sees_the_application_around_the_pages(url, orders):
    def access(request):
        return Access.READ.by(request.app.title) if request.headers.get("x-user") == "carol" else Access.NONE

    page = app(url, access=access)
    with serving(page, mounted=in_fastapi(page), prefix=PREFIX) as site:
        stranger, carol = site.client().get("/"), site.client(X_User="carol").get("/")

    assert (stranger.status_code, carol.status_code) == (403, 200)
    assert ">FastAPI<" in carol.text
