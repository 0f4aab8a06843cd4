import "./dom.ts";
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { Link, type LinkState, linkWords } from "../src/consoles/link.ts";
import { isLeaving, machineOf } from "../src/consoles/page.ts";
import { type Refusal, refusal } from "../src/consoles/refusal.ts";

const settle = async () => {
  for (let i = 0; i < 10; i++) await Promise.resolve();
};

class FakeSocket extends EventTarget {
  readyState = 1;
  sent: (string | Uint8Array)[] = [];
  send(data: string | Uint8Array) {
    this.sent.push(data);
  }
  opened() {
    this.dispatchEvent(new Event("open"));
  }
  closed(code: number, reason = "") {
    this.dispatchEvent(Object.assign(new Event("close"), { code, reason }));
  }
}

/** A link whose sockets and refusals a test decides. */
function linked() {
  const world = {
    states: [] as LinkState[],
    sockets: [] as FakeSocket[],
    refusal: null as Refusal | null,
    asked: 0,
    get last() {
      return this.states.at(-1);
    },
    get socket() {
      return this.sockets.at(-1) as FakeSocket;
    },
  };
  const link = new Link({
    refusal: () => {
      world.asked++;
      return Promise.resolve(world.refusal);
    },
    open: () => {
      world.sockets.push(new FakeSocket());
      return world.socket as unknown as WebSocket;
    },
    state: (state) => world.states.push(state),
    socket: () => {},
  });
  return { link, world };
}

function timers(run: () => Promise<void>) {
  return async () => {
    mock.timers.enable({ apis: ["setTimeout", "Date"] });
    try {
      await run();
    } finally {
      mock.timers.reset();
    }
  };
}

test(
  "a connection that is lost comes back, ever later, and soon again after a good one",
  timers(async () => {
    const { world } = linked();
    await settle();
    const pauses: number[] = [];
    for (let i = 0; i < 7; i++) {
      world.socket.closed(1006);
      const { last } = world;
      if (last?.kind !== "waiting") return assert.fail(last?.kind);
      pauses.push(last.seconds);
      mock.timers.tick(last.seconds * 1000 - 1);
      await settle();
      assert.equal(world.sockets.length, i + 1, "not before its time");
      mock.timers.tick(1);
      await settle();
    }
    assert.deepEqual(pauses, [1, 2, 4, 8, 16, 30, 30]);
    world.socket.opened();
    mock.timers.tick(10_000);
    world.socket.closed(1006);
    assert.deepEqual(world.last, { kind: "waiting", why: "the connection was lost", seconds: 1 });
  }),
);

test(
  "what ended for a reason that stays is not tried again without being asked",
  timers(async () => {
    for (const code of [1008, 1013]) {
      const { link, world } = linked();
      await settle();
      world.socket.opened();
      world.socket.closed(code, "the session has ended");
      assert.deepEqual(world.last, { kind: "ended", why: "the session has ended" });
      mock.timers.tick(3_600_000);
      await settle();
      assert.equal(world.sockets.length, 1, `${code}`);
      await link.connect();
      assert.equal(world.sockets.length, 2);
      await link.connect();
      assert.equal(world.sockets.length, 2, "at most one socket");
    }
    const { world } = linked();
    world.refusal = { why: "there is no machine a", isFinal: true };
    await settle();
    assert.equal(world.sockets.length, 1, "it was asked before");
    world.socket.closed(1006);
    mock.timers.tick(1000);
    await settle();
    assert.deepEqual(world.last, { kind: "ended", why: "there is no machine a" });
    mock.timers.tick(3_600_000);
    await settle();
    assert.deepEqual([world.asked, world.sockets.length], [2, 1]);
  }),
);

test(
  "a daemon that is away is asked again, but not while nobody sees the page",
  timers(async () => {
    const { link, world } = linked();
    await settle();
    world.refusal = { why: "spillwayd does not answer", isFinal: false };
    world.socket.closed(1006);
    const page = document as unknown as { visibilityState: string };
    page.visibilityState = "hidden";
    mock.timers.tick(60_000);
    await settle();
    assert.equal(world.asked, 1);
    page.visibilityState = "visible";
    await link.connect();
    assert.equal(world.asked, 2);
    assert.deepEqual(world.last, { kind: "waiting", why: "spillwayd does not answer", seconds: 2 });
  }),
);

test(
  "the end of a run is said, and the next run is waited for",
  timers(async () => {
    const { world } = linked();
    await settle();
    world.socket.opened();
    world.refusal = { why: "the machine is off", isFinal: false };
    world.socket.closed(1001, "the machine's run has ended");
    assert.deepEqual(world.last, { kind: "waiting", why: "the machine's run has ended", seconds: 1 });
    mock.timers.tick(1000);
    await settle();
    assert.deepEqual(world.last, { kind: "waiting", why: "the machine is off", seconds: 2 });
    world.refusal = null;
    mock.timers.tick(2000);
    await settle();
    assert.equal(world.sockets.length, 2);
  }),
);

test("what is pasted is sent in pieces that the daemon takes", async () => {
  Object.assign(globalThis, { WebSocket: { OPEN: 1 } });
  const { link, world } = linked();
  await settle();
  const keys = Uint8Array.from({ length: 20_000 }, (_, i) => i % 251);
  link.send(keys);
  const sent = world.socket.sent as Uint8Array[];
  assert.deepEqual(
    sent.map((piece) => piece.length),
    [8192, 8192, 3616],
  );
  assert.deepEqual(Uint8Array.from(sent.flatMap((piece) => [...piece])), keys);
  world.socket.readyState = 3;
  link.send("late");
  assert.equal(sent.length, 3);
});

test("it says why a console cannot be opened", async () => {
  const of = async (what: "console" | "screen", session: [number, unknown], machine: [number, unknown]) => {
    const found = await refusal(what, "a", (path) => {
      const [status, body] = path === "/v1/session" ? session : machine;
      return Promise.resolve({ status, body, etag: null });
    });
    return found && `${found.why}${found.isFinal ? "" : ", again"}`;
  };
  const operate: [number, unknown] = [200, { role: "operate" }];
  const running = (run: object | null): [number, unknown] => [200, { status: { run } }];
  assert.match((await of("console", [401, null], [200, null])) ?? "", /^you are not signed in/);
  assert.match((await of("screen", [200, { role: "read" }], [200, null])) ?? "", /needs the role operate/);
  assert.equal(await of("console", [500, null], [200, null]), "spillwayd does not answer, again");
  assert.equal(await of("console", operate, [404, null]), "there is no machine a");
  assert.equal(await of("console", operate, [503, null]), "spillwayd does not answer, again");
  assert.equal(await of("console", operate, running(null)), "the machine is off, again");
  assert.equal(await of("console", operate, running({})), "the machine has no serial console");
  assert.match((await of("screen", operate, running({ display: "none" }))) ?? "", /has no screen/);
  assert.equal(await of("screen", operate, running({ display: "vnc" })), null);
  assert.equal(await of("console", [200, { role: "admin" }], running({ console_socket: "/x" })), null);
  const away = await refusal("console", "a", () => Promise.reject(new Error("no connection")));
  assert.deepEqual(away, { why: "spillwayd does not answer", isFinal: false });
  assert.equal(
    linkWords({ kind: "waiting", why: "the connection was lost", seconds: 4 }),
    "Not connected: the connection was lost. It is tried again in 4 s.",
  );
});

test("Ctrl+] leaves the console, by its sign or by its place", () => {
  const key = (more: object) =>
    isLeaving({ type: "keydown", ctrlKey: true, altKey: false, key: "x", code: "KeyX", ...more });
  assert.equal(key({ key: "]", code: "BracketRight" }), true);
  assert.equal(key({ key: "]", code: "Digit9", altKey: true }), true, "with AltGr on another layout");
  assert.equal(key({ key: "$", code: "BracketRight" }), true);
  assert.equal(key({ key: "]", ctrlKey: false }), false);
  assert.equal(key({ key: "]", type: "keyup" }), false);
  assert.equal(key({}), false);
});

test("the address names a machine, or none", () => {
  assert.equal(machineOf("#/machines/desk-001"), "desk-001");
  for (const hash of ["", "#/machines/", "#/machines/a/b", "#/machines/../x", "#/catalogs/a"])
    assert.equal(machineOf(hash), null, hash);
});
