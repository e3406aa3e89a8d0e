"""The judge that asks a server, against a real one with a real model: ``transformers serve``.

SmolLM2-135M can't follow the rubric. What is tested is that a real server's answers, whatever they
are, become verdicts of a known type, that nothing is sent which the server refuses, and that no
category is invented.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter

import pytest
from judging import verdicts_of

from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.rubric import CATEGORIES, NAMES
from ia_mech.judge.verdict import Item
from ia_mech.models import embedded

TURNS = 10


@pytest.fixture(scope="module")
def url():
    lacking = [name for name in ("fastapi", "uvicorn") if not importlib.util.find_spec(name)]
    if lacking:
        pytest.skip(f"transformers serve needs {', '.join(lacking)} (pip install fastapi uvicorn)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    process = subprocess.Popen(
        [*command, str(embedded.directory().resolve()), "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_real_server(url, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = LlmJudge(
        str(embedded.directory().resolve()),
        base_url=url,
        params={"temperature": 0, "max_tokens": 60},
        concurrency=2,
        timeout=300,
    )
    examples = [e for category in CATEGORIES for e in category.examples][:TURNS]
    verdicts = verdicts_of(judge, [Item(e.query, e.response, e.turn) for e in examples])
    print(Counter((v.status, v.mode, v.category) for v in verdicts))
    for verdict in verdicts:
        assert verdict.status in ("judged", "truncated", "unparsable", "empty")
        assert (verdict.category in NAMES) == (verdict.status == "judged")
        assert verdict.mode.startswith("json_schema")  # taken, and ignored, by this server
        assert verdict.prompt_tokens > 2000 and verdict.completion_tokens > 0
