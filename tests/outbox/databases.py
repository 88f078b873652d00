"""The databases of the tests, with reliq's tables and the application's, emptied for each test."""

import sqlite3
from contextlib import closing

from reliq.outbox.tables import ddl

#: Tables of the application: its orders, and a row for each effect of a message.
TABLES = ("CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY)", "CREATE TABLE IF NOT EXISTS effects (id text)")


class Sqlite:
    """An SQLite file."""

    dialect = "sqlite"

    def __init__(self, path) -> None:
        self.url = f"sqlite:///{path}"
        self._path = path
        with closing(self.connect()) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            for statement in (*ddl("sqlite"), *TABLES):
                connection.execute(statement)

    def connect(self):
        """Return a connection that starts transactions automatically."""
        connection = sqlite3.connect(self._path, check_same_thread=False)
        connection.execute("PRAGMA synchronous=OFF")
        return connection


class Postgresql:
    """The schema `public` of a server shared by tests."""

    dialect = "postgresql"

    def __init__(self, server) -> None:
        import psycopg

        self.url, self.server, self._psycopg = server.url, server, psycopg
        with self.connect() as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
            for statement in (*ddl("postgresql"), *TABLES):
                connection.execute(statement)

    def connect(self):
        """Return a connection that starts transactions automatically."""
        return self._psycopg.connect(self.url)


def all_of(database, sql):
    """Return the rows of a statement, read on a separate connection."""
    with closing(database.connect()) as connection:
        return connection.execute(sql).fetchall()


def execute(database, *statements):
    """Run statements in a separate transaction."""
    with closing(database.connect()) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def rows_of(database):
    """Return queue and id of each row of the outbox."""
    return all_of(database, "SELECT queue, id FROM reliq_outbox")


def unsent(database):
    """Return the number of unsent rows of the outbox."""
    return all_of(database, "SELECT count(*) FROM reliq_outbox WHERE sent_ms IS NULL")[0][0]


def bodies(queue, limit=500):
    """Receive and ack the ready messages; return their bodies."""
    with queue.receive(limit=limit) as jobs:
        return [job.body for job in jobs]
