"""A server on the loopback interface that answers as a test tells it to."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Script:
    """What the server does, request after request (the last step goes on), and what it was asked."""

    def __init__(self, *steps):
        self.steps, self.requests, self.headers = list(steps), [], []
        self._lock = threading.Lock()
        self.busy = self.most_busy = 0
        self.stop = threading.Event()

    def next(self, body, headers):
        with self._lock:
            self.requests.append(json.loads(body))
            self.headers.append(dict(headers))
            return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def enter(self, by):
        with self._lock:
            self.busy += by
            self.most_busy = max(self.most_busy, self.busy)


def answer(value, status=200):
    """A step: send JSON."""
    return lambda handler, script: _send(handler, status, json.dumps(value).encode())


def raw(data, status=200):
    """A step: send these bytes."""
    return lambda handler, script: _send(handler, status, data)


def hang(handler, script):
    """A step: answer nothing until the server is closed."""
    script.stop.wait(60)


def trickle(handler, script):
    """A step: send a byte now and then, for longer than any deadline of a test."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not script.stop.wait(0.05):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return


def drop(handler, script):
    """A step: close the connection without an answer."""
    handler.connection.close()


def computed(function):
    """A step: send what the function makes of the request."""
    return lambda handler, script: _send(handler, 200, json.dumps(function(script.requests[-1])).encode())


def slow(value, seconds):
    """A step: send JSON after a while."""

    def step(handler, script):
        script.enter(1)
        time.sleep(seconds)
        script.enter(-1)  # before the answer: whoever has it may ask again at once
        _send(handler, 200, json.dumps(value).encode())

    return step


@contextmanager
def serving(*steps):
    """Yields the address and the script of a server that runs while the block does."""
    script = Script(*steps)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            step = script.next(body, self.headers)
            step(self, script)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", script
    finally:
        script.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _send(handler, status, data):
    try:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
    except OSError:
        pass  # the client gave up
