// How objects are read: again after an act, soon after a failure, and never without end.
import { repeat } from "./dom.ts";
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import { raw, Unreachable } from "../src/api/client.ts";
import { newEvents } from "../src/state/events.ts";
import { copyOf, oldParts, readSoon, refresh, watch } from "../src/state/resource.ts";
import { awaySince, hasEnded, session } from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { type Reply, transport } from "../src/transport.ts";

const settled = () => new Promise((done) => setImmediate(done));
let asked: {
  path: string;
  signal: AbortSignal | undefined;
  answer(body: unknown, status?: number): void;
  fail(why: unknown): void;
}[] = [];
let release: () => void = () => {};

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  asked = [];
  visible.value = true;
  session.value = { is: "in", session: { caller: "a", role: "read", by: "token", seconds_left: null } };
  transport.request = ({ path, signal }) =>
    new Promise<Reply>((done, fail) => {
      signal?.addEventListener("abort", () => fail(signal.reason));
      if (path !== "/v1/session") {
        const answer = (body: unknown, status = 200) => done({ status, etag: '"1"', body });
        asked.push({ path, signal, answer, fail });
      }
    });
});
afterEach(() => {
  release();
  mock.timers.reset();
});

const shown = (path: string) => copyOf(path, false, 5000).value;
const begin = (path: string) => {
  release = watch(path, false, 5000);
};
/** Answers the only request that is under way. */
async function answer(body: unknown, status = 200): Promise<void> {
  assert.equal(asked.length, 1);
  asked.pop()?.answer(body, status);
  await settled();
}
const pass = (ms: number) => {
  mock.timers.tick(ms);
  repeat();
};

test("what was asked for while an object is read is read once more", async () => {
  begin("/v1/host?a");
  assert.equal(asked.length, 1);
  refresh();
  refresh();
  assert.equal(asked.length, 1, "one at a time");
  await answer({ is: "before" });
  assert.deepEqual(shown("/v1/host?a").data, { is: "before" });
  pass(100);
  await answer({ is: "after" });
  assert.deepEqual(shown("/v1/host?a").data, { is: "after" });
  assert.equal(asked.length, 0, "and then no more");
  // The same with an event that comes meanwhile, after a short pause.
  pass(5000);
  newEvents.value++;
  await answer({ is: "old" });
  pass(399);
  assert.equal(asked.length, 0);
  pass(1);
  await answer({ is: "new" });
  pass(4999);
  assert.equal(asked.length, 0);
});

test("who watches says how often, and what is known to have changed is read before", async () => {
  release = watch("/v1/host?often", false, 30_000);
  await answer({ is: "first" });
  pass(29_999);
  assert.equal(asked.length, 0);
  pass(1);
  await answer({ is: "second" });
  pass(5000);
  readSoon("/v1/host?often");
  readSoon("/v1/host?nobody");
  pass(399);
  assert.equal(asked.length, 0);
  pass(1);
  await answer({ is: "third" });
  // Events do not come any more: it is read more often, from now on.
  release();
  release = watch("/v1/host?often", false, 10_000);
  pass(9999);
  assert.equal(asked.length, 0);
  pass(1);
  await answer({ is: "fourth" });
  pass(9999);
  assert.equal(asked.length, 0);
  pass(1);
  await answer({ is: "fifth" });
});

test("what was deleted is not asked for while the page changes", async () => {
  begin("/v1/host?deleted");
  await answer({});
  refresh();
  release();
  release = () => {};
  pass(1000);
  assert.equal(asked.length, 0);
  begin("/v1/host?changed");
  await answer({ is: "before" });
  refresh();
  mock.timers.tick(100);
  await answer({ is: "after" });
});

test("a failed reading is repeated soon, and what is shown says how old it is", async () => {
  begin("/v1/catalogs/a%20b?x=1");
  await answer({ is: "good" });
  assert.deepEqual(oldParts(Date.now()), []);
  pass(5000);
  const problem = { title: "Busy", detail: "too much at once", status: 429, code: "busy", type: "" };
  await answer(problem, 429);
  for (const ms of [1000, 2000, 4000, 8000, 10_000, 10_000]) {
    pass(ms - 1);
    assert.equal(asked.length, 0, `not before ${ms}`);
    pass(1);
    await answer(problem, 429);
  }
  assert.deepEqual(shown("/v1/catalogs/a%20b?x=1").data, { is: "good" }, "it stays");
  const [old] = oldParts(Date.now());
  assert.deepEqual(
    [old?.parts, old?.at, old?.error.message],
    [["catalogs", "a b"], 1_000_000, "too much at once"],
  );
  pass(10_000);
  await answer({ is: "better" });
  assert.deepEqual([oldParts(Date.now()), shown("/v1/catalogs/a%20b?x=1").error], [[], null]);
  pass(4999);
  assert.equal(asked.length, 0, "and again as usual");
  pass(1);
  await answer(problem, 429);
  pass(1000);
  await answer({ is: "best" });
});

test("what is gone is not shown any more", async () => {
  begin("/v1/machines/gone");
  await answer({ name: "gone" });
  pass(5000);
  await answer({ detail: "no such machine", code: "not_found" }, 404);
  const { data, etag, error } = shown("/v1/machines/gone");
  assert.deepEqual([data, etag, error?.message], [undefined, null, "no such machine"]);
  assert.deepEqual(oldParts(Date.now() + 60_000), []);
});

test("a hidden page asks for nothing, and for all when it is seen again", () => {
  visible.value = false;
  begin("/v1/host?hidden");
  refresh();
  pass(60_000);
  assert.equal(asked.length, 0);
  visible.value = true;
  assert.equal(asked.length, 1);
});

test("after the end of a session nothing is asked for, what is shown stays, and all is read when it goes on", async () => {
  begin("/v1/host?session");
  await answer({ is: "before" });
  pass(5000);
  await answer({ detail: "who is it?", code: "unauthenticated" }, 401);
  hasEnded.value = true;
  refresh();
  pass(60_000);
  assert.equal(asked.length, 0);
  hasEnded.value = false;
  pass(100);
  // Somebody was quick: it failed a moment ago.
  await answer({ detail: "who is it?", code: "unauthenticated" }, 401);
  hasEnded.value = true;
  pass(500);
  assert.equal(asked.length, 0);
  assert.deepEqual(shown("/v1/host?session").data, { is: "before" });
  hasEnded.value = false;
  pass(100);
  await answer({ is: "after" });
  assert.deepEqual(shown("/v1/host?session").data, { is: "after" });
});

test("a daemon that is slow with one request, and answers others, is not away", async () => {
  const slow = raw("GET", "/v1/machines/a/curve");
  const others = async (path: string) => {
    const other = raw("GET", path);
    await new Promise((done) => setImmediate(done));
    asked.pop()?.answer({});
    await other;
  };
  const late = asked.pop();
  await others("/v1/host?other");
  late?.fail(new DOMException("late", "TimeoutError"));
  await assert.rejects(slow, /has not answered in time/);
  assert.equal(awaySince.value, null);
  // What was answered before says nothing of now.
  const last = raw("GET", "/v1/machines/a/curve");
  asked.pop()?.fail(new DOMException("late", "TimeoutError"));
  await assert.rejects(last, Unreachable);
  assert.equal(awaySince.value, Date.now());
  awaySince.value = null;
});

test("each GET ends, and what does not come from spillwayd is no answer", async () => {
  const deadlines: number[] = [];
  const timeout = mock.method(AbortSignal, "timeout", (ms: number) => {
    deadlines.push(ms);
    return AbortSignal.abort(new DOMException("late", "TimeoutError"));
  });
  transport.request = async ({ signal }) => {
    signal?.throwIfAborted();
    return { status: 200, etag: null, body: undefined };
  };
  await assert.rejects(raw("GET", "/v1/host"), /has not answered in time/);
  await assert.rejects(raw("GET", "/v1/images/a/versions/1/check"), Unreachable);
  assert.deepEqual(deadlines, [20_000, 60_000]);
  assert.equal(awaySince.value, Date.now());
  timeout.mock.restore();
  await assert.rejects(raw("POST", "/v1/host", { body: {} }), /not of spillwayd/);
  // Who gives up is no daemon that is away.
  awaySince.value = null;
  const abort = AbortSignal.abort();
  await assert.rejects(raw("GET", "/v1/host", { signal: abort }), { name: "AbortError" });
  assert.equal(awaySince.value, null);
});
