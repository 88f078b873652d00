"""URLs of a Cluster: accepted everywhere a URL is, rejected if it is no Cluster, updated when the Cluster changes."""

import pytest
import redis
from ports import free_port
from waiting import eventually

from reliq import Admin, ConfigurationError, Consumer, LoginError, Queue, RedisUnavailableError
from reliq.redis.server import Connection
from reliq.testing.server import EmbeddedRedis


def works(queue, call):
    receipt = call(queue, "publish", 1, headers={"b": "c"})
    with queue.receive() as [job]:
        assert (job.id, job.body, job.headers) == (receipt.id, 1, {"b": "c"})
    assert call(queue, "counts").totals["acked"] == 1
    return True


def test_queues_on_every_node_work_by_one_url(queues, call):
    assert all(works(queue, call) for queue in queues.values())


def test_cluster_url_works_with_one_node_that_answers(cluster, call):
    port = cluster.primaries()[0].port

    for number, places in enumerate((f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}", f"localhost:{port}/0")):
        queue = Queue(f"other{number}", int, url=f"redis+cluster://{places}")
        assert works(queue, call)
        queue.close()


def test_a_redis_py_client_of_a_cluster_works_as_before(cluster, call):
    theirs = redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, decode_responses=True)

    assert works(Queue("q", int, url=theirs), call)
    assert theirs.set("theirs", "ü")
    assert theirs.get("theirs") == "ü"
    theirs.close()


def test_a_consumer_and_an_operator_take_a_clusters_url(cluster, queues):
    done, consumer = [], Consumer(cluster.url)
    for queue in queues.values():
        consumer.handler(queue)(done.append)
        queue.publish(1)

    consumer.drain()

    assert done == [1, 1, 1]
    admin = Admin(cluster.url)
    assert {one.queue for one in admin.queues().queues} == {queue.name for queue in queues.values()}
    assert all(admin.account(queue.name).missing == 0 for queue in queues.values())


def test_plain_url_of_a_cluster_node_is_refused_with_the_right_scheme(cluster, call):
    port = cluster.nodes[0].port
    queue = Queue("q", int, url=f"redis://127.0.0.1:{port}/0")

    with pytest.raises(ConfigurationError, match=rf"redis://127.0.0.1:{port}/0 is a node .* write redis\+cluster://"):
        call(queue, "counts")
    with pytest.raises(ConfigurationError, match="is a node of a Redis Cluster"):
        Admin(f"redis://127.0.0.1:{port}").account("q")


def test_a_clusters_url_that_names_a_single_server_is_refused(redis_server, call):
    queue = Queue("q", int, url=f"redis+cluster://127.0.0.1:{redis_server.port}")

    with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{redis_server.port} is a single server .* redis://HOST"):
        call(queue, "counts")


@pytest.mark.usefixtures("impatient")
def test_cluster_that_is_away_raises_redis_unavailable(call):
    queue = Queue("q", int, url="redis+cluster://127.0.0.1:1,127.0.0.1:2")

    with pytest.raises(RedisUnavailableError, match="no node of the Cluster answers") as caught:
        call(queue, "counts")

    assert not caught.value.maybe_ran


@pytest.fixture(scope="module")
def locked(server_path):
    """A node with every slot that requires a password."""
    server = EmbeddedRedis(server=server_path, port=free_port(), options={"cluster-enabled": "yes"})
    with server, redis.Redis(port=server.port) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        eventually(lambda: client.cluster("info")["cluster_state"] == "ok", "the cluster is well")
        client.config_set("requirepass", "s3cret")
        yield f"127.0.0.1:{server.port}"


def test_user_and_password_are_used_for_every_node_and_never_shown(locked, call):
    queue = Queue("q", int, url=f"redis+cluster://:s3cret@{locked}")
    assert call(queue, "publish", 1).status == "published"
    with pytest.raises(LoginError) as caught:
        call(Queue("q", int, url=f"redis+cluster://:wr0ng@{locked}"), "counts")

    assert "wr0ng" not in str(caught.value)
    assert "s3cret" not in Connection.to(f"redis+cluster://:s3cret@{locked}").name
