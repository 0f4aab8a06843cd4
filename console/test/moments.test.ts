import assert from "node:assert/strict";
import { test } from "node:test";
import type { Figures } from "../src/api/client.ts";
import { samplesOf, timesOf } from "../src/state/history.ts";
import { Moments, ratesBetween, type Sample, secondsToFull } from "../src/state/moments.ts";

/** At this second a machine's RAM tier holds so much, and its guest has written so much. */
function moment(second: number, of: [string, number, number][], since = "2025-12-31T00:00:00Z"): Figures {
  const levels = (used: number) => ({ ram_used_bytes: used, ram_limit_bytes: 1000 });
  const counters = (written: number) => ({
    guest: { written_bytes: written, writes: written / 10 },
    ram: { written_bytes: written },
    write_count: written / 10,
    write_ns: written * 500,
  });
  const sum = (i: 1 | 2) => of.reduce((n, m) => n + m[i], 0);
  return {
    time: `2026-01-01T00:00:${String(second).padStart(2, "0")}Z`,
    since,
    stores: [],
    machines: of.map(([name, used, written]) => ({
      name,
      catalog: "desk",
      phase: "running",
      ready: true,
      claimed: false,
      unresponsive: false,
      levels: levels(used),
      counters: counters(written),
      spared_bytes: 0,
    })),
    catalogs: [
      {
        name: "desk",
        machines: {},
        warm: 0,
        disks: of.length,
        unresponsive_disks: 0,
        levels: levels(sum(1)),
        counters: counters(sum(2)),
        spared_bytes: 7,
      },
    ],
  };
}

test("rates are of the last interval, and trends of more", () => {
  const moments = new Moments();
  assert.deepEqual(moments.machines(), []);
  moments.add(moment(0, [["a", 100, 0]]));
  assert.equal(moments.machines()[0]?.rates, null);
  moments.add(moment(10, [["a", 200, 500]]));
  assert.equal(
    moments.add(moment(10, [["a", 200, 500]])),
    false,
    "the same answer once more is no other moment",
  );
  moments.add(moment(12, [["a", 220, 600]]));
  const row = moments.machines()[0];
  assert.equal(row?.rates?.guest.written, 50);
  assert.equal(row?.rates?.guest.writes, 5);
  assert.equal(row?.rates?.latencyNs, 5000);
  assert.equal(row?.secondsToFull, 78, "120 in 12 s, and 780 are left");
  assert.equal(moments.catalogs()[0]?.rates?.guest.written, 50);
  moments.add(moment(13, [["a", 90, 600]]));
  assert.equal(moments.machines()[0]?.secondsToFull, null, "it shrinks");
  moments.add(moment(14, [["a", 90, 5]], "2026-01-01T00:00:13Z"));
  assert.equal(
    moments.machines()[0]?.rates,
    null,
    "another daemon's counters are not compared with those of the last",
  );
});

test("a new machine's counters are compared with nothing", () => {
  const moments = new Moments();
  moments.add(moment(0, [["a", 0, 0]]));
  moments.add(
    moment(1, [
      ["a", 0, 0],
      ["b", 10, 100],
    ]),
  );
  assert.equal(moments.machines()[1]?.rates?.guest.written, 100);
  assert.equal(moments.machines()[1]?.secondsToFull, null);
});

test("samples are kept, and what the daemon knows of before stands in front", () => {
  const moments = new Moments();
  for (let second = 0; second < 5; second++) moments.add(moment(second, [["a", 0, second * 100]]));
  const samples = () => moments.catalogs()[0]?.samples ?? [];
  assert.deepEqual(
    samples().map((s) => s.ramWritten),
    [100, 100, 100, 100],
  );
  const first = samples()[0] as Sample;
  moments.seed("catalogs", "desk", [
    { ...first, time: first.time - 10, ramWritten: 7 },
    { ...first, ramWritten: 8 },
  ]);
  assert.deepEqual(
    samples().map((s) => s.ramWritten),
    [7, 100, 100, 100, 100],
  );
});

test("of what is gone no samples are kept, and of too many none", () => {
  const moments = new Moments();
  const lengths = () => moments.machines().map((row) => [row.name, row.samples.length]);
  for (let second = 0; second < 4; second++) moments.add(moment(second, [["a", 0, 0], ["b", 0, 0]]));
  assert.deepEqual(lengths(), [["a", 3], ["b", 3]]);
  moments.add(moment(4, [["a", 0, 0]]));
  moments.add(moment(5, [["a", 0, 0], ["b", 0, 0]]));
  assert.deepEqual(lengths(), [["a", 5], ["b", 1]], "another one has the name");
  const many = Array.from({ length: 201 }, (_, i): [string, number, number] => [i ? `m${i}` : "a", 0, 0]);
  moments.add(moment(6, many));
  assert.deepEqual(lengths()[0], ["a", 0]);
  const { catalogs } = moment(7, []);
  const alike = many.map(([name]) => ({ ...(catalogs[0] as Figures["catalogs"][number]), name }));
  for (const second of [7, 8]) moments.add({ ...moment(second, []), catalogs: alike });
  assert.deepEqual(moments.lastingCatalogs(), [], "and none is seeded");
});

test("when nothing has changed, rates fall to nothing", () => {
  const moments = new Moments();
  moments.add(moment(0, [["a", 0, 0]]));
  moments.add(moment(2, [["a", 10, 100]]));
  assert.equal(moments.machines()[0]?.rates?.guest.written, 50);
  moments.repeat(2000);
  assert.equal(moments.machines()[0]?.rates?.guest.written, 0);
  // The daemon's clock is a little behind that of the browser: nothing is forgotten.
  moments.repeat(2500);
  moments.add(moment(6, [["a", 10, 300]]));
  assert.equal(moments.machines()[0]?.rates?.guest.written, 100);
});

test("a catalog lasts that is in two moments", () => {
  const moments = new Moments();
  const both = moment(2, [["a", 0, 0]]);
  const deleted = { ...both.catalogs[0], name: "deleted" } as Figures["catalogs"][number];
  moments.add({ ...moment(0, [["a", 0, 0]]), catalogs: [...both.catalogs, deleted] });
  assert.deepEqual(moments.lastingCatalogs(), []);
  moments.add({ ...both, catalogs: [...both.catalogs, { ...deleted, name: "new" }] });
  assert.deepEqual(moments.lastingCatalogs(), ["desk"]);
});

test("after a break nothing is compared with what was before it", () => {
  const moments = new Moments();
  moments.add(moment(0, [["a", 0, 0]]));
  moments.add(moment(2, [["a", 10, 100]]));
  moments.pause();
  const row = () => moments.machines()[0];
  assert.equal(row()?.fill, 0.01, "what is known is still shown");
  assert.deepEqual([row()?.rates, row()?.secondsToFull, row()?.samples], [null, null, []]);
  moments.add(moment(50, [["a", 20, 5000]]));
  assert.deepEqual([row()?.rates, row()?.secondsToFull, row()?.samples], [null, null, []]);
  moments.add(moment(52, [["a", 20, 5200]]));
  assert.equal(row()?.rates?.guest.written, 100);
  moments.pause();
  moments.repeat(60_000);
  assert.equal(row()?.rates, null, "also if nothing has changed meanwhile");
});

test("a counter that falls is no negative rate", () => {
  assert.equal(
    ratesBetween({ guest: { written_bytes: 1 } }, { guest: { written_bytes: 5 } }, 1).guest.written,
    0,
  );
});

test("time to full counts both tiers", () => {
  const levels = (ram: number, overflow: number) => ({
    ram_used_bytes: ram,
    overflow_used_bytes: overflow,
    ram_limit_bytes: 100,
    overflow_limit_bytes: 100,
  });
  assert.equal(secondsToFull(levels(100, 50), levels(100, 0), 10), 10);
  assert.equal(secondsToFull(levels(100, 100), levels(100, 90), 10), 0);
  assert.equal(secondsToFull({}, {}, 10), null);
});

test("a history ends at its time, and what is not known is left out", () => {
  const history = {
    until: "2026-01-01T00:01:00Z",
    step_seconds: 10,
    series: [
      { name: "ram_written_bytes", values: [null, 1, 2] },
      { name: "fill", values: [0.5] },
    ],
  };
  const end = Date.parse(history.until) / 1000;
  assert.deepEqual(timesOf(history), [end - 20, end - 10, end]);
  assert.deepEqual(
    samplesOf(history).map((s) => [s.time, s.ramWritten, s.fill]),
    [
      [end - 10, 1, 0],
      [end, 2, 0.5],
    ],
  );
});
