"""A dense retriever by the URL of a server of Search-R1's form, against a small local one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("bm25s", reason="search needs its extra: pip install verl_bpo[search]")

from verl_bpo.envs.search.environment import SearchEnvironment
from verl_bpo.sandbox import SandboxError
from verl_bpo.sandbox.memory import MemoryBackend

PASSAGES = ['"Paris"\nParis is the capital of France.', '"London"\nLondon lies at the Thames.']


class Handler(BaseHTTPRequestHandler):
    """Answers as Search-R1's retrieval_server.py does. A query may ask for a fault by its name."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked))
        (query,) = asked["queries"]
        if query == "hang":
            self.server.gone.wait(30)
            return
        if query == "drop":
            self.close_connection = True
            return
        found = [{"document": {"id": "0", "contents": text}, "score": 0.5} for text in PASSAGES]
        answers = {
            "html": b"<html>busy</html>",
            "form": json.dumps({"result": [[{"contents": "x"}]]}).encode(),
            "empty": json.dumps({"result": [[]]}).encode(),
        }
        self.send_response(500 if query == "fault" else 200)
        self.end_headers()
        self.wfile.write(answers.get(query, json.dumps({"result": [found]}).encode()))

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.gone = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.gone.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def url(server):
    return f"http://127.0.0.1:{server.server_port}/retrieve"


@pytest.fixture
def task(tmp_path):
    rows = [{"question": "What is the capital of France?", "golden_answers": ["Paris"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    return f"{tmp_path}/train.parquet#0"


def test_a_search_asks_the_server_in_its_form(server, url, task):
    environment = SearchEnvironment(retriever=url, top_k=1)
    environment.reset(task)
    assert environment.step("search[capital]").text == "Doc 1(Title: Paris) Paris is the capital of France."
    assert server.asked == [("/retrieve", {"queries": ["capital"], "topk": 1, "return_scores": True})]
    assert environment.step("search[empty]").text == "Nothing was found."
    SearchEnvironment.check_task(task, retriever=url)


def test_the_server_may_be_named_by_a_variable(url, task, monkeypatch):
    monkeypatch.setenv("SEARCH_RETRIEVER", url)
    environment = SearchEnvironment()
    environment.reset(task)
    assert len(environment.step("search[x]").text.splitlines()) == 2


@pytest.mark.parametrize(
    "query, timeout, said",
    [
        ("hang", 0.2, "did not answer in 0.2 s"),
        ("drop", 30, "failed: "),
        ("fault", 30, "failed: HTTP Error 500"),
        ("html", 30, "answered '<html>busy</html>' in place of"),
        ("form", 30, "in place of"),
    ],
)
def test_a_fault_of_the_server_costs_its_branch_alone_with_one_line(url, task, query, timeout, said):
    backend = MemoryBackend("search", {"retriever": url, "timeout": timeout})
    sandbox = backend.sandbox()
    sandbox.reset(task)
    snapshot = sandbox.snapshot()
    lost, kept = snapshot.fork(2)
    with pytest.raises(SandboxError) as caught:
        lost.step(f"search[{query}]")
    message = str(caught.value)
    assert said in message and url in message and "\n" not in message
    assert kept.step("answer[Paris]").info["won"]


def test_a_server_that_is_gone_is_said(server, task):
    environment = SearchEnvironment(retriever="http://127.0.0.1:9/retrieve")
    environment.reset(task)
    with pytest.raises(SandboxError, match="retrieval server http://127.0.0.1:9/retrieve failed"):
        environment.step("search[x]")
