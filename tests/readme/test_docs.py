"""Run each page of docs/ as written: write its programs into files and run its commands in order."""

import json
import re
import tomllib

import pytest
import yaml
from go_original import GoProgram
from pages import BLOCK, DOCS, OF_THEIR_OWN, README, ROOT, blocks, commands, name_of, printed, programs
from transition import run_transition

from reliq import Admin, Layout, OutgoingMessage, Queue
from reliq.cli.app import Commands
from reliq.keys import Keys

pytestmark = pytest.mark.slow
RUN = [page for page in DOCS if name_of(page) not in OF_THEIR_OWN]
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")


def for_go(client, _url):
    """A Go program has published two messages, which are due; the handler nacks order 13, which has no retries left."""
    go = GoProgram(client, Keys("order:timeout", Layout.hdt3213()))
    go.publish(b"41", due=client.time()[0] - 60)
    nacked = go.publish(b"13", due=client.time()[0] - 60, retries=0)
    go.promote(client.time()[0])

    def holds(said):
        is_dead = re.search(rf"{nacked}.* being paid", said)
        return is_dead and "order 41 is closed" in said and "order:timeout" in said and "NOT" not in said

    return holds


def for_handlers(_client, url):
    """Three messages wait; the batch handler rejects one of them."""
    queue = Queue("orders", dict[str, int], url=url)
    queue.publish_many(OutgoingMessage(body={"number": number}, retries=0) for number in (1, 2, 666))

    def holds(said):
        totals = queue.counts().totals
        return "orders in one go" in said and (totals["acked"], totals["nacked"]) == (4, 1)

    return holds


def for_dead_letters(_client, url):
    """A message is a dead letter, with another reason than the message of the page."""
    queue = Queue("orders", dict[str, int], url=url)
    queue.publish({"number": 14}, id="order-14")
    with queue.receive() as [job]:
        job.reject(reason="no route")
    assert run_transition(queue, "collect", ["order-14"], dead_letter_limit=10, letters_ms=10**9)
    return lambda said: said.count("no such order") >= 2 and "order-14 rejected no route 1" in said


def for_operations(client, url):
    """One message is ready, and an old queue is empty."""
    queue = Queue("orders", dict[str, int], url=url)
    queue.publish({"number": 42}, id="order-42")
    client.hset("reliq:queues", "orders-old", "1")
    return lambda said: "order-42" in said and (queue.counts().ready, queue.counts().pending) == (1, 0)


def for_keys(_client, url):
    """The waiting keys are listed, all messages are handled, and the limit has changed at the end."""

    def holds(said):
        admin, queue = Admin(url), Queue("mails", url=url)
        is_listed = all(re.search(rf"tenant-{number}\b", said) for number in (0, 1, 2, 7)) and "nobody: me@" in said
        return is_listed and (queue.counts().totals["acked"], admin.limits("mails").per_key) == (8, 4)

    return holds


def for_scaling(_client, url):
    """There is a queue with a message, and no worker."""
    Queue("orders", dict[str, int], url=url).publish({"number": 1})
    return lambda said: "orders" in said


def for_web(_client, _url):
    """The application serves the pages and rejects anonymous users."""
    return lambda said: said.split() == ["ok", "403"]


#: Page -> the function that prepares Redis, and returns a check of the commands' output.
BEFORE = {
    "migrating/go.md": for_go,
    "guides/ordering.md": for_keys,
    "guides/handlers.md": for_handlers,
    "guides/dead-letters.md": for_dead_letters,
    "production/operations.md": for_operations,
    "production/web.md": for_web,
    "production/scaling.md": for_scaling,
}
#: Page -> further text in the output of its commands.
SAID = {
    "guides/periodic.md": ["daily_report", "every 300", "Europe/Berlin"],
    "guides/long-jobs.md": ["attempt 1 resumes at None\npage 0\npage 1\n", "attempt 2 resumes at 2\npage 2\n"],
    "guides/results.md": ["ready None\n", "acked {'total': 42}\n"],
    "production/security.md": ["ACL SETUSER", "evalsha"],
    "recipes/workflows.md": ["order 7 goes to Main Street 1", "order 1 is packed"],
}


@pytest.mark.parametrize("page", [page for page in RUN if commands(page)], ids=name_of)
def test_commands_of_a_page_run_as_written(page, shop, client, url):
    name = name_of(page)
    holds = BEFORE[name](client, url) if name in BEFORE else lambda _: True
    run = shop(page)

    said = "".join(map(run, commands(page)))

    assert holds(said), said
    assert [words for words in SAID.get(name, ()) if words not in said] == []
    lines = said.splitlines()
    told = [line for program in programs(page).values() for line in printed(program) if " " not in line or "(" in line]
    assert [line for line in told if line in lines] == told


def test_every_program_of_a_page_is_run_by_its_commands():
    idle = []
    for page in RUN:
        typed, texts = "\n".join([*commands(page), *blocks(page, "console")]), programs(page)
        for name in texts:
            stem = name.removeprefix("shop/").removesuffix(".py")
            if not re.search(rf"shop[./]{stem}\b", typed) and f"shop.{stem} import" not in "".join(texts.values()):
                idle.append((name_of(page), name))

    assert idle == []


def test_blocks_of_toml_yaml_and_json_are_valid():
    for page in DOCS:
        assert page.read_text("utf-8").count("```") == 2 * len(BLOCK.findall(page.read_text("utf-8"))), page
        for language, read in {"toml": tomllib.loads, "yaml": yaml.safe_load_all, "json": json.loads}.items():
            assert all(list(read(block)) for block in blocks(page, language)), page


def test_commands_and_layouts_named_in_pages_exist():
    unknown = []
    for page in (README, *DOCS):
        text = page.read_text("utf-8")
        unknown += [(page.name, name) for name in set(re.findall(r"`reliq (\w+)", text)) - set(Commands.places)]
        layouts = re.findall(r"--layout (?!LAYOUT)([\w:=,.-]+)", text)
        unknown += [(page.name, layout) for layout in layouts if str(Layout.parse(layout)) != layout]

    assert unknown == []


def anchors(page):
    """Return the anchors of a page that a link may use."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_pages_lead_to_files_and_headings():
    broken = []
    for page in (README, *DOCS):
        for link, anchor in _LINK.findall(page.read_text("utf-8")):
            target = page.parent / link if link else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append((name_of(page), link, anchor))

    assert broken == []


def test_files_linked_from_the_readme_are_in_the_source_distribution():
    links = {link for link, _ in _LINK.findall(README.read_text("utf-8")) if link}
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["sdist"]

    assert {link.split("/")[0] for link in links} - set(packed["include"]) == set()


def test_layout_is_the_same_on_the_command_line_and_in_python():
    rows = re.findall(
        r"`--layout (\S+)` \| `Layout\.hdt3213\((.*)\)`", (ROOT / "docs/migrating/go.md").read_text("utf-8")
    )

    assert len(rows) == 4
    for text, arguments in rows:
        options = dict(re.findall(r'(\w+)=(?:"(\w+)"|True)', arguments))
        assert Layout.parse(text) == Layout.hdt3213(**{name: value or True for name, value in options.items()})
