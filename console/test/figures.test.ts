// Figures that grow old: when that is said, and when it is not.
import "./dom.ts";
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { figuresAt, startFigures, staleFigures } from "../src/state/figures.ts";
import { hasEnded, session } from "../src/state/session.ts";
import { visible } from "../src/state/visible.ts";
import { age } from "../src/ui/ranges.tsx";
import { type Reply, transport } from "../src/transport.ts";

const FIGURES = { time: "2026-01-01T00:00:00Z", machines: [], catalogs: [], stores: [] };
const settled = () => new Promise((done) => setImmediate(done));

test("figures that do not come are stale, and old ones that are just asked for again are not", async () => {
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  let answer: (reply: Reply) => void = () => {};
  transport.request = () =>
    new Promise((done) => {
      answer = done;
    });
  const come = async (reply: Partial<Reply>) => {
    answer({ status: 200, etag: null, body: FIGURES, ...reply });
    await settled();
  };
  const stale = () => staleFigures(Date.now());
  startFigures();
  session.value = { is: "in", session: { caller: "a", role: "read", by: "session", seconds_left: 9 } };
  mock.timers.tick(8000);
  assert.equal(stale(), null);
  mock.timers.tick(1);
  assert.deepEqual(stale(), { at: null, error: null }, "there are none, and that is said");
  await come({});
  const at = figuresAt.value;
  assert.equal(at, Date.now());
  mock.timers.tick(8000);
  assert.equal(stale(), null);
  mock.timers.tick(1);
  assert.deepEqual(stale(), { at, error: null }, "the daemon is slow");
  await come({ status: 503, body: { detail: "busy" } });
  assert.deepEqual([stale()?.at, stale()?.error?.message], [at, "busy"]);
  // The page is seen again after a minute: others will be there at once.
  for (const paused of [visible, hasEnded]) {
    const isPaused = paused === hasEnded;
    paused.value = isPaused;
    mock.timers.tick(60_000);
    assert.equal(stale(), null, "nobody looks");
    paused.value = !isPaused;
    mock.timers.tick(8000);
    assert.equal(stale(), null);
    mock.timers.tick(1);
    assert.equal(stale()?.at, at);
  }
  await come({});
  assert.equal(stale(), null);
  mock.timers.reset();
});

test("how old ranges are is said", () => {
  assert.equal(age(1000, 900), "read now");
  assert.equal(age(1000, 1999), "read now");
  assert.equal(age(1000, 10_000), "read 9 s ago");
});
