// Events as they come: by a stream, by polling, after a break, and those of before.
import "./dom.ts";
import assert from "node:assert/strict";
import { afterEach, beforeEach, mock, test } from "node:test";
import type { Event } from "../src/api/client.ts";
import { isShown } from "../src/pages/events-list.tsx";
import {
  events,
  following,
  hasOldest,
  merge,
  newEvents,
  readOlder,
  startEvents,
} from "../src/state/events.ts";
import { togetherAfter } from "../src/state/figures.ts";
import { awaySince, hasEnded, session } from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { type Reply, type StreamCallbacks, transport } from "../src/transport.ts";

const event = (n: number, history = "h", kind: Event["kind"] = "ready"): Event => ({
  id: `${history}-${n}`,
  kind,
  object: "machine/a",
  text: "",
  time: "2026-01-01T00:00:00Z",
});
const many = (from: number, to: number) => Array.from({ length: to - from + 1 }, (_, i) => event(from + i));
const ids = (of: Event[] = events.value) => of.map((e) => e.id);
const settled = () => new Promise((done) => setImmediate(done));

/** The streams that were opened, the last one last. */
let streams: { path: string; callbacks: StreamCallbacks; isClosed: boolean }[] = [];
/** The requests that wait for their answer. */
let asked: { path: string; signal: AbortSignal | undefined; answer(items: Event[]): void }[] = [];

beforeEach(() => {
  mock.timers.enable({ apis: ["setTimeout", "Date"] });
  streams = [];
  asked = [];
  transport.stream = (path, callbacks) => {
    const stream = { path, callbacks, isClosed: false };
    streams.push(stream);
    return {
      close: () => {
        stream.isClosed = true;
      },
    };
  };
  transport.request = ({ path, signal }) =>
    new Promise<Reply>((done, fail) => {
      signal?.addEventListener("abort", () => fail(signal.reason));
      if (path !== "/v1/session") {
        asked.push({ path, signal, answer: (items) => done({ status: 200, etag: null, body: { items } }) });
      }
    });
});
afterEach(() => mock.timers.reset());

const send = (...sent: Event[]) => {
  for (const one of sent) streams.at(-1)?.callbacks.message(JSON.stringify(one));
  mock.timers.tick(100);
};

test("events come once, whoever brings them", () => {
  const first = merge([], [event(1), event(2), event(1)]);
  assert.deepEqual(ids(first), ["h-2", "h-1"], "also within one batch");
  assert.deepEqual(ids(merge(first, [event(2), event(3), event(2), event(3)])), ["h-3", "h-2", "h-1"]);
  const after = merge(first, [event(0, "k", "lost"), event(1, "k")]);
  assert.deepEqual(ids(after), ["k-1", "k-0", "h-2", "h-1"], "another history begins anew");
});

test("the stream, a break, polling, and the stream again: no gap, and none twice", async () => {
  startEvents();
  session.value = { is: "in", session: { caller: "a", role: "read", by: "token", seconds_left: null } };
  assert.equal(streams.at(-1)?.path, "/v1/event-stream");
  streams.at(-1)?.callbacks.opened();
  assert.equal(following.value, "stream");
  send(event(11), event(12));
  assert.deepEqual([ids(), newEvents.value], [["h-12", "h-11"], 0], "those of the past are not new");
  send(event(13));
  assert.equal(newEvents.value, 1);
  // The browser opens an interrupted stream again by itself, behind its last event.
  streams.at(-1)?.callbacks.interrupted();
  assert.equal(following.value, "connecting", "who is not connected does not follow");
  streams.at(-1)?.callbacks.opened();
  send(event(14));
  assert.equal(following.value, "stream");
  // A stream that has lasted ends: another one follows when events have been asked for.
  mock.timers.tick(15_000);
  streams.at(-1)?.callbacks.failed();
  assert.deepEqual([following.value, streams.length], ["polling", 1]);
  assert.equal(asked.at(-1)?.path, "/v1/events?after=h-14");
  asked.at(-1)?.answer([event(15)]);
  await settled();
  assert.equal(streams.at(-1)?.path, "/v1/event-stream?after=h-15");
  // That one ends at once, perhaps since there is no place for it: the next one follows later.
  streams.at(-1)?.callbacks.opened();
  streams.at(-1)?.callbacks.failed();
  assert.deepEqual([following.value, streams.length], ["polling", 2]);
  asked.at(-1)?.answer([event(16)]);
  await settled();
  mock.timers.tick(5000);
  assert.equal(asked.at(-1)?.path, "/v1/events?after=h-16");
  // The answer is late: meanwhile the page was hidden, and is seen again.
  const late = asked.at(-1);
  visible.value = false;
  assert.equal(following.value, "paused");
  visible.value = true;
  assert.equal(streams.at(-1)?.path, "/v1/event-stream?after=h-16");
  assert.equal(late?.signal?.aborted, true);
  late?.answer([event(17)]);
  streams.at(-1)?.callbacks.opened();
  await settled();
  send(event(17), event(18));
  assert.deepEqual(
    ids(),
    many(11, 18)
      .reverse()
      .map((e) => e.id),
  );
  mock.timers.tick(60_000);
  await settled();
  assert.deepEqual([following.value, asked.length, streams.length], ["stream", 3, 3], "one source, not two");
  // The daemon does not answer, and its stream hangs without an end.
  awaySince.value = 1;
  assert.deepEqual([following.value, streams.at(-1)?.isClosed], ["connecting", true]);
  awaySince.value = null;
  assert.deepEqual([streams.length, streams.at(-1)?.path], [4, "/v1/event-stream?after=h-18"]);
  // The session ends, and somebody signs in again: it goes on behind the last event.
  hasEnded.value = true;
  assert.deepEqual([following.value, streams.at(-1)?.isClosed], ["paused", true]);
  hasEnded.value = false;
  assert.deepEqual([streams.length, streams.at(-1)?.path], [5, "/v1/event-stream?after=h-18"]);
  // What the daemon has lost is an event, and every list shows it.
  send(event(20, "h", "lost"));
  assert.equal(events.value[0]?.kind, "lost");
  assert.equal(
    isShown(events.value[0] as Event, () => false),
    true,
  );
  assert.equal(
    isShown(event(1), () => false),
    false,
  );
});

test("events before those that the page has are read, until there are none", async () => {
  events.value = many(5000, 5002).reverse();
  assert.equal(hasOldest.value, false);
  const look = readOlder();
  assert.equal(asked.at(-1)?.path, "/v1/events?before=h-5000&limit=1000");
  // After a host that has ended without a warning, numbers are left out.
  asked.at(-1)?.answer(many(904, 1903));
  await look;
  assert.deepEqual([events.value.length, events.value.at(-1)?.id, hasOldest.value], [1003, "h-904", false]);
  const further = readOlder();
  assert.equal(asked.at(-1)?.path, "/v1/events?before=h-904&limit=1000");
  asked.at(-1)?.answer(many(801, 903));
  await further;
  assert.deepEqual([events.value.at(-1)?.id, hasOldest.value], ["h-801", true]);
  assert.deepEqual(
    ids(),
    [...many(801, 1903), ...many(5000, 5002)].reverse().map((e) => e.id),
  );
});

test("consoles ask for figures at the same moments, however long their answers take", () => {
  for (const now of [0, 1, 999, 1000, 1001, 1999, 123_456_789]) {
    for (const wait of [2000, 2700, 3500]) {
      const at = now + togetherAfter(wait, now);
      assert.equal(at % 2000, 0);
      assert.ok(Math.abs(at - now - wait) <= 1000, `${now} ${wait}`);
    }
    assert.equal(togetherAfter(600, now), 600);
  }
});
