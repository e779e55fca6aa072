"""`fir serve` with the default model: the whole contract, a signal under load, a crash, the flags."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

ROOT = pathlib.Path(__file__).parents[3]
FIR = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug" / "fir"
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fir tree."}]}


class Server:
    """A server of its own; what it says on stderr is kept."""

    def __init__(self, *flags):
        self.process = subprocess.Popen(
            [FIR, "serve", "--port", "0", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://\S+", line):
                self.url = found[0]
                break
        else:
            raise RuntimeError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def chat(self, **more):
        return httpx.post(f"{self.url}/v1/chat/completions", json=CHAT | more, timeout=120)


def test_the_contract_holds_for_a_model():
    with Server("--vllm-metrics", "--queue-requests", "64") as server:
        assert any(line.startswith("load") for line in server.lines), server.lines
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "crates/fir-server/tests/contract.py")],
            env=os.environ | {"FIR_URL": server.url, "FIR_BURST": "100"},
        )
        assert done.returncode == 0


def test_a_prefix_is_cached_per_key():
    text = "The quick brown fox jumps over the lazy dog. " * 20
    with Server("--api-key", "one", "--api-key", "two") as server:
        def cached(key):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one") < 32
        assert cached("one") > 100
        assert cached("two") < 32, "what one key asked, another must not see"
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_a_signal_under_load_loses_no_accepted_request():
    with Server() as server:
        answers, lock = [], threading.Lock()

        def ask(i):
            try:
                answer = server.chat(max_tokens=60, ignore_eos=True, stream=i % 2 == 0)
            except httpx.HTTPError as e:
                answer = e
            with lock:
                answers.append(answer)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        [t.start() for t in threads]
        while "fir_requests_total" not in (text := httpx.get(f"{server.url}/metrics").text) or not re.search(
            r"fir_requests_total\{[^}]*\} 24", text
        ):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        try:
            late = httpx.get(f"{server.url}/health").status_code
            assert late == 503
        except httpx.HTTPError:
            pass  # All of it was over by then.
        [t.join() for t in threads]
        assert server.process.wait(timeout=60) == 0
        for answer in answers:
            assert not isinstance(answer, Exception), answer
            assert answer.status_code == 200 and "finish_reason\":\"length" in answer.text


def test_settings_come_from_flags_and_a_file(tmp_path):
    def fir(*flags):
        return subprocess.run([FIR, "serve", *flags], capture_output=True, text=True)

    file = tmp_path / "fir.toml"
    file.write_text('port = 1234\nname = "mine"\n')
    shown = fir("--config", str(file), "--port", "4321", "--print-config")
    assert shown.returncode == 0
    assert re.search(r"port = 4321 +# command line", shown.stdout)
    assert re.search(rf'name = "mine" +# {file}', shown.stdout)
    assert re.search(r"host = .* # default", shown.stdout)
    file.write_text("prot = 1\n")
    wrong = fir("--config", str(file), "--print-config")
    assert wrong.returncode != 0 and "prot" in wrong.stderr
    flags = re.findall(r"^ +(?:-\w, )?--([\w-]+)", fir("--help").stdout, re.M)
    assert len(flags) <= 25, flags
    assert fir("--model", "/nowhere.gguf").returncode != 0


def test_chat_in_a_terminal():
    lines = "My name is Ada.\n/reset\n/nonsense\nSay hi.\n/exit\n"
    done = subprocess.run([FIR, "chat", "--max-tokens", "12", "--seed", "1"], input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() and "`/nonsense` is no command" in done.stderr


def test_bench_serve(tmp_path):
    with Server() as server:
        report, plot = tmp_path / "a.json", tmp_path / "a.svg"
        flags = ["--url", server.url, "--requests", "12", "--rate", "20", "--input", "64", "--output", "8"]
        done = subprocess.run([FIR, "bench", "serve", *flags, "--json", report, "--svg", plot], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "first token" in done.stdout and "generated tokens/s" in done.stdout
        found = json.loads(report.read_text())
        assert found["requests"] == 12 and found["failed"] == 0 and found["generated_tokens"] == 96
        assert plot.read_text().startswith("<svg")
        trace = tmp_path / "t.csv"
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,40,4\n2023-11-16 18:17:04.9,20,3\n")
        done = subprocess.run([FIR, "bench", "serve", "--url", server.url, "--trace", trace, "--speed", "10"], capture_output=True, text=True)
        assert done.returncode == 0 and "2 requests" in done.stdout, done
