// Tests of the way through Cockpit: a WebSocket over a channel, and requests, with a Cockpit that does what a test says.
import assert from "node:assert/strict";
import { test } from "node:test";
import "./dom.ts";
import type { Channel, Cockpit, Ended, Failure, Sent } from "../src/cockpit/cockpit";
import { ChannelSocket } from "../src/cockpit/socket.ts";
import { CockpitTransport } from "../src/cockpit/transport.ts";
import { NoConnection } from "../src/transport.ts";

// Node.js 20 has none.
class FakeCloseEvent extends Event {
  readonly code: number;
  readonly reason: string;
  readonly wasClean: boolean;
  constructor(type: string, init: { code: number; reason: string; wasClean: boolean }) {
    super(type);
    ({ code: this.code, reason: this.reason, wasClean: this.wasClean } = init);
  }
}
Object.assign(globalThis, { CloseEvent: FakeCloseEvent });

const encoder = new TextEncoder();

class FakeChannel implements Channel {
  sent: Uint8Array[] = [];
  isClosed = false;
  message: (event: Event, data: Uint8Array) => void = () => {};
  ended: (event: Event, options: Ended) => void = () => {};
  send(data: Uint8Array): void {
    assert.ok(!this.isClosed, "nothing is sent on a channel that is closed");
    this.sent.push(data);
  }
  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    // As Cockpit does, at once.
    this.ended(new Event("close"), {});
  }
  addEventListener(type: string, listener: unknown): void {
    if (type === "message") this.message = listener as FakeChannel["message"];
    else this.ended = listener as FakeChannel["ended"];
  }
  give(data: Uint8Array): void {
    this.message(new Event("message"), data);
  }
}

/** A socket, its channel, and all that happens on it. */
async function opened(protocols: string[] = []) {
  const channel = new FakeChannel();
  const socket = new ChannelSocket({
    path: "/v1/machines/desk-001/console",
    protocols,
    connect: () => channel,
    words: ({ problem }) => `ended: ${problem}`,
  });
  const happened: unknown[] = [];
  socket.onopen = () => happened.push("open");
  socket.onmessage = ({ data }) =>
    happened.push(data instanceof ArrayBuffer ? [...new Uint8Array(data)] : data);
  socket.onclose = ({ code, reason }) => happened.push([code, reason]);
  while (channel.sent.length === 0) await new Promise((done) => setTimeout(done, 1));
  const request = new TextDecoder().decode(channel.sent.shift());
  const key = request.match(/Key: (.*)\r\n/)?.[1];
  const digest = await crypto.subtle.digest(
    "SHA-1",
    encoder.encode(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`),
  );
  const accept = btoa(String.fromCharCode(...new Uint8Array(digest)));
  const head = encoder.encode(
    `HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: ${accept}\r\n\r\n`,
  );
  return { socket, channel, happened, head };
}

test("a socket opens, in parts too, and gives messages in their order", async () => {
  const { socket, channel, happened, head } = await opened();
  assert.throws(() => socket.send("a"), /not open/);
  channel.give(head.subarray(0, 30));
  assert.equal(socket.readyState, 0);
  channel.give(Uint8Array.from([...head.subarray(30), 0x82, 2, 1, 2, 0x81]));
  channel.give(Uint8Array.of(1, 65));
  assert.deepEqual(happened, ["open", [1, 2], "A"]);
  socket.send("x");
  socket.send(Uint8Array.of(1, 2, 3).subarray(1));
  assert.deepEqual(
    channel.sent.map((sent) => [sent[0], sent.length]),
    [
      [0x81, 7],
      [0x82, 8],
    ],
  );
});

test("a ping is answered with what it says", async () => {
  const { channel, head } = await opened();
  channel.give(head);
  channel.give(Uint8Array.of(0x89, 1, 66));
  const [pong] = channel.sent;
  assert.deepEqual([pong?.[0], (pong?.[6] ?? 0) ^ (pong?.[2] ?? 0)], [0x8a, 66]);
});

test("the daemon's end is answered and told once, with its reason", async () => {
  const { socket, channel, happened, head } = await opened();
  channel.give(head);
  channel.give(Uint8Array.from([0x88, 5, 3, 233, ...encoder.encode("end"), 0x82, 1, 1]));
  assert.deepEqual(happened, ["open", [1001, "end"]]);
  assert.deepEqual([channel.sent[0]?.[0], channel.isClosed, socket.readyState], [0x88, true, 3]);
  channel.give(Uint8Array.of(0x82, 1, 1));
  socket.send("late");
  socket.close();
  assert.deepEqual([happened.length, channel.sent.length], [2, 1]);
});

test("a channel that ends says why in words", async () => {
  const { channel, happened } = await opened();
  channel.ended(new Event("close"), { problem: "not-found" });
  assert.deepEqual(happened, [[1006, "ended: not-found"]]);
});

test("what is against the protocol ends the socket", async () => {
  const refused = await opened();
  refused.channel.give(encoder.encode("HTTP/1.1 403 Forbidden\r\n\r\n"));
  assert.deepEqual(refused.happened, [[1006, "spillwayd has refused it (status 403)"]]);
  assert.ok(refused.channel.isClosed);
  const broken = await opened();
  broken.channel.give(broken.head);
  broken.channel.give(Uint8Array.of(0xff, 0xff));
  assert.deepEqual(broken.happened, ["open", [1006, "a frame has bits of an extension"]]);
  assert.deepEqual([broken.channel.sent[0]?.[0], broken.channel.isClosed], [0x88, true]);
});

test("a socket that is closed here waits for the answer, but not for ever", async (t) => {
  const { socket, channel, happened, head } = await opened();
  channel.give(head);
  t.mock.timers.enable({ apis: ["setTimeout"] });
  socket.close();
  assert.deepEqual([socket.readyState, channel.isClosed], [2, false]);
  t.mock.timers.tick(1000);
  assert.deepEqual(happened, ["open", [1006, ""]]);
  assert.ok(channel.isClosed);
});

test("a socket that is closed before it is open sends nothing", async () => {
  const { socket, channel, happened } = await opened();
  socket.close();
  assert.deepEqual([happened, channel.sent, channel.isClosed], [[[1006, ""]], [], true]);
});

interface Asked {
  options: { method: string; path: string; body: Uint8Array | ""; headers: Record<string, string> };
  head(status: number, headers: Record<string, string>): void;
  part(data: Uint8Array): void;
  done(data: Uint8Array): void;
  failed(failure: Failure, data?: Uint8Array): void;
  closed: string | null;
}

/** A transport on a Cockpit that notes what it is asked. */
function withCockpit(more: Partial<Cockpit> = {}, host = "localhost") {
  const asked: Asked[] = [];
  const session = new FakeChannel();
  const sockets: string[] = [];
  const cockpit: Cockpit = {
    http: (socket) => {
      sockets.push(socket);
      return {
        request: (options) => {
          const request = { options, closed: null } as Asked;
          asked.push(request);
          const sent: Sent = {
            response: (callback) => {
              request.head = callback;
              return sent;
            },
            stream: (callback) => {
              request.part = callback;
              return sent;
            },
            // biome-ignore lint/suspicious/noThenProperty: Cockpit's own promises
            then: (done, failed) => {
              request.done = done;
              request.failed = failed;
            },
            close: (problem) => {
              request.closed = problem;
              request.failed({ problem });
            },
          };
          return sent;
        },
      };
    },
    channel: () => session,
    transport: {
      wait: (callback) => callback(),
      host,
      csrf_token: "token",
      uri: (suffix) => `wss://host/cockpit/${suffix}`,
    },
    manifests: {},
    ...more,
  };
  const next = async () => {
    while (asked.length === 0) await new Promise((done) => setTimeout(done, 0));
    return asked.shift() as Asked;
  };
  return { transport: new CockpitTransport(cockpit), next, session, sockets };
}

test("a request has its headers and its body, and its answer the status, the tag and the JSON", async () => {
  const { transport, next, sockets } = withCockpit();
  const reply = transport.request({
    method: "POST",
    path: "/v1/x",
    body: { a: "ü" },
    headers: { "If-Match": "1" },
  });
  const asked = await next();
  assert.deepEqual(sockets, ["/run/spillway/spillwayd.sock"]);
  assert.deepEqual(asked.options, {
    method: "POST",
    path: "/v1/x",
    headers: { Accept: "application/json", "Content-Type": "application/json", "If-Match": "1" },
    body: encoder.encode('{"a":"ü"}'),
  });
  asked.head(202, { ETag: '"7"' });
  asked.done(encoder.encode('{"b":"ü"}'));
  assert.deepEqual(await reply, { status: 202, etag: '"7"', body: { b: "ü" } });
});

test("an answer that refuses is an answer", async () => {
  const { transport, next } = withCockpit();
  const reply = transport.request({ method: "GET", path: "/v1/x" });
  const asked = await next();
  assert.equal(asked.options.body, "");
  asked.head(404, {});
  asked.failed({ status: 404 }, encoder.encode('{"code":"not_found"}'));
  assert.deepEqual(await reply, { status: 404, etag: null, body: { code: "not_found" } });
});

test("a request that is not wanted any more is cancelled", async () => {
  const { transport, next } = withCockpit();
  const abort = new AbortController();
  const reply = transport.request({ method: "GET", path: "/v1/x", signal: abort.signal });
  const asked = await next();
  abort.abort();
  await assert.rejects(reply, { name: "AbortError" });
  assert.equal(asked.closed, "cancelled");
});

test("a daemon that cannot be reached is said with what to do", async () => {
  const { transport, next, session } = withCockpit({ manifests: { spillway: { config: { socket: "/x" } } } });
  for (const [problem, words] of [
    ["access-denied", /You may not use \/x\. Turn on administrative access/],
    ["not-found", /Nothing answers at \/x\. .*systemctl status spillwayd/],
  ] as const) {
    const reply = transport.request({ method: "GET", path: "/v1/x" });
    (await next()).failed({ problem });
    await assert.rejects(reply, (error) => error instanceof NoConnection && words.test(error.message));
  }
  const broken = transport.request({ method: "GET", path: "/v1/x" });
  (await next()).done(new Uint8Array(0));
  await assert.rejects(broken, /Nothing answers/);
  session.ended(new Event("close"), { problem: "disconnected" });
  await assert.rejects(transport.request({ method: "GET", path: "/v1/x" }), /session has ended/);
});

test("the page of another host in Cockpit asks nobody", async () => {
  const { transport } = withCockpit({}, "other");
  await assert.rejects(transport.request({ method: "GET", path: "/v1/x" }), /open that of other/);
});

test("a stream of events goes on behind the last one, and ends when it is refused", async (t) => {
  const { transport, next } = withCockpit();
  const happened: unknown[] = [];
  const stream = transport.stream("/v1/event-stream", {
    opened: () => happened.push("opened"),
    message: (data) => happened.push(data),
    interrupted: () => happened.push("interrupted"),
    failed: () => happened.push("failed"),
  });
  const first = await next();
  t.mock.timers.enable({ apis: ["setTimeout"] });
  first.head(200, {});
  first.part(encoder.encode("id: 7\ndata: a\n\nda"));
  first.failed({ problem: "terminated" });
  t.mock.timers.tick(3000);
  t.mock.timers.reset();
  const second = await next();
  assert.equal(second.options.headers["Last-Event-ID"], "7");
  second.head(503, {});
  second.failed({ status: 503 });
  assert.deepEqual(happened, ["opened", "a", "interrupted", "failed"]);
  stream.close();
});

test("a stream that is closed says nothing more", async () => {
  const { transport, next } = withCockpit();
  const happened: unknown[] = [];
  const note = (what: unknown) => happened.push(what);
  const stream = transport.stream("/", {
    opened: () => note("opened"),
    message: note,
    interrupted: () => note("interrupted"),
    failed: () => note("failed"),
  });
  const asked = await next();
  stream.close();
  asked.head(200, {});
  asked.part(encoder.encode("data: a\n\n"));
  assert.deepEqual([happened, asked.closed], [[], "cancelled"]);
});

test("a document is loaded through Cockpit, from the daemon's socket alone", () => {
  const { transport } = withCockpit();
  const [path, query] = transport.document("/v1/reports/a/report.html").split("?");
  assert.equal(path, "/cockpit/channel/token");
  assert.deepEqual(JSON.parse(atob(query ?? "")), {
    payload: "http-stream2",
    unix: "/run/spillway/spillwayd.sock",
    superuser: "try",
    binary: "raw",
    method: "GET",
    path: "/v1/reports/a/report.html",
    external: { "content-type": "text/html; charset=utf-8" },
  });
});

test("a read or a stream that is silent for too long is given up", async (t) => {
  const { transport, next } = withCockpit();
  let interruptions = 0;
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const turn = async () => {
    for (let i = 0; i < 5; i++) await Promise.resolve();
  };
  const read = transport.request({ method: "GET", path: "/v1/x" });
  await turn();
  const reading = await next();
  const act = transport.request({ method: "POST", path: "/v1/x" });
  await turn();
  const acting = await next();
  const stream = transport.stream("/", {
    opened: () => {},
    message: () => {},
    interrupted: () => {
      interruptions++;
    },
    failed: () => {},
  });
  await turn();
  const events = await next();
  t.mock.timers.tick(20_000);
  events.part(encoder.encode(":\n\n"));
  t.mock.timers.tick(10_000);
  await assert.rejects(read, /Nothing answers/);
  // An act may take as long as it needs.
  assert.deepEqual([reading.closed, acting.closed, events.closed], ["cancelled", null, null]);
  acting.head(200, {});
  acting.done(encoder.encode("1"));
  assert.equal((await act).body, 1);
  t.mock.timers.tick(20_000);
  assert.deepEqual([events.closed, interruptions], ["timeout", 1]);
  t.mock.timers.tick(3000);
  await turn();
  assert.equal((await next()).options.path, "/");
  stream.close();
});
