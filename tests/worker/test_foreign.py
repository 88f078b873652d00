"""Whatever a foreign publisher writes, the messages beside it are worked, and its own as it wrote it."""

from reliq import Layout
from reliq.events import Acked


def publish_as_go_does(client, queue, id: bytes, body: bytes) -> None:
    base = queue.keys.msg("").encode()
    client.set(base + id, body, px=60_000)
    client.hset(queue.keys.counts, id, "3")
    client.lpush(queue.keys.ready, id)


def test_an_id_that_is_no_text_stops_nobody_and_goes_its_own_way(make_queue, consumer, start, recorder, client):
    queue = make_queue("go", bytes, layout=Layout.hdt3213())
    bodies = []
    consumer.handler(queue)(bodies.append)
    publish_as_go_does(client, queue, b"\xff\xfe", b"strange")
    publish_as_go_does(client, queue, b"plain", b"good")

    start()

    recorder.wait_for(Acked, count=2)
    assert sorted(bodies) == [b"good", b"strange"]
    assert client.exists(queue.keys.msg("").encode() + b"\xff\xfe") == 0
    assert queue.counts().unack == 0


def test_a_bare_body_that_looks_like_an_envelope_is_a_body(make_queue, consumer, start, recorder, client):
    queue = make_queue("go", bytes, layout=Layout.hdt3213())
    bodies = []
    consumer.handler(queue)(bodies.append)
    looks_like_one = b'RELIQ/1 {"d":1,"r":1,"e":1,"w":-5}\nhello'
    publish_as_go_does(client, queue, b"a", looks_like_one)

    start()

    recorder.wait_for(Acked)
    assert bodies == [looks_like_one]


def test_a_bare_body_that_looks_like_an_envelope_is_never_written_to(make_queue, client):
    queue = make_queue("go", bytes, layout=Layout.hdt3213())
    looks_like_one = b'RELIQ/1 {"d":1,"r":1,"e":1,"w":0}\nhello'
    place = queue.keys.msg("").encode() + b"a"
    publish_as_go_does(client, queue, b"a", looks_like_one)

    for settle in ("nack", "snooze"):
        with queue.receive(lease=30, wait=20) as [job]:
            getattr(job, settle)(delay=0)
        assert client.get(place) == looks_like_one
    assert queue.reschedule("a", delay=0) == "rescheduled"
    with queue.receive(wait=20) as [job]:
        job.reject()
    assert client.get(place) == looks_like_one
    queue.moves.collect(["a"], letters_max=10, letters_ms=10_000)
    assert queue.redrive(queue.letters()) == 1
    assert client.get(place) == looks_like_one
